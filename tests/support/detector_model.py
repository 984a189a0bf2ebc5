"""A detector, small enough to read: logits and boxes of its queries are sums of the pixels, weighted at random."""

import numpy as np
from msgspec.structs import replace

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import Profile
from edge.bundles.steps import BoxPostprocess
from edge.datatypes import TensorSpec
from tests.support import image_model
from tests.support.image_model import encoded, picture
from tests.support.models import graph_of, manifest_of, serialized, tier_of

NAME = "finder"
SIZE, MAX_BATCH_SIZE, QUERIES, LABELS = 8, 4, 6, ("cat", "dog", "bird")
STEP = replace(image_model.STEP, size=SIZE, colours="rgb", mean=(0.0,) * 3, std=(1.0,) * 3, resize="letterbox")
BOXES = BoxPostprocess(
    logits="logits",
    shares="pred_boxes",
    boxes="boxes",
    scores="scores",
    classes="classes",
    activation="sigmoid",
    label="labels",
    labels=LABELS,
)
_WEIGHTS = [
    np.random.default_rng(seed).normal(0, 0.5, (3 * SIZE * SIZE, QUERIES * columns)).astype(np.float32)
    for seed, columns in enumerate((len(LABELS), 4))
]


def outputs(pixels):
    """Return logits and boxes for pixels, [rows, 3, size, size]."""
    logits, places = (pixels.reshape(len(pixels), -1) @ weights for weights in _WEIGHTS)
    return logits.reshape(-1, QUERIES, len(LABELS)), 1 / (1 + np.exp(-places.reshape(-1, QUERIES, 4)))


def graph(logits="logits", boxes="pred_boxes", function="Identity", scale=1):
    """Return the graph, with a function of the logits and a factor of the boxes; of pixels of 0, the logits are NaN."""
    return graph_of(
        f"""finder (float[batch, 3, {SIZE}, {SIZE}] pixels) =>
            (float[batch, {QUERIES}, {len(LABELS)}] {logits}, float[batch, {QUERIES}, 4] {boxes}) {{
            flat = Flatten<axis = 1>(pixels)
            sums = ReduceL1<axes = [1]>(flat)  ones = Div(sums, sums)
            weighted = MatMul(flat, for_logits)  sure = Mul(weighted, ones)
            shaped = Reshape(sure, of_logits)  {logits} = {function}(shaped)
            placed = MatMul(flat, for_boxes)  places = Reshape(placed, of_boxes)
            shares = Sigmoid(places)  {boxes} = Mul(shares, scale)
        }}""",
        for_logits=_WEIGHTS[0],
        for_boxes=_WEIGHTS[1],
        of_logits=np.array([-1, QUERIES, len(LABELS)]),
        of_boxes=np.array([-1, QUERIES, 4]),
        scale=np.array(scale, np.float32),
    )


def searched(logits, shares, size, *, softmax=False, threshold=0.5, top_k=100):
    """Return score, class and corners of each box in one picture in a letterbox, the likeliest first.

    A search of all pairs of query and class, in Python's numbers.
    """
    found = []
    side = max(size)
    for of_query, (x, y, width, height) in zip(logits.tolist(), (shares.astype(float) * side).tolist(), strict=True):
        powers = np.exp(of_query)
        scores = [*(powers / powers.sum())[:-1]] if softmax else [*(powers / (1 + powers))]
        kept = [max(enumerate(scores), key=lambda one: one[1])] if softmax else enumerate(scores)
        corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        found += [(score, number, corners) for number, score in kept if score > threshold]
    return sorted(found, key=lambda one: -one[0])[:top_k]


def manifest(**fields):
    defaults = {"preprocess": STEP, "postprocess": BOXES, "max_batch_size": MAX_BATCH_SIZE}
    return manifest_of(
        NAME,
        (TensorSpec("pixels", "FP32", (-1, 3, SIZE, SIZE)),),
        (TensorSpec("logits", "FP32", (-1, QUERIES, len(LABELS))), TensorSpec("pred_boxes", "FP32", (-1, QUERIES, 4))),
        {"pixels": Profile(min=(1, 3, SIZE, SIZE), opt=(1, 3, SIZE, SIZE), max=(MAX_BATCH_SIZE, 3, SIZE, SIZE))},
        tiers=(tier_of(atol=1e-3),),
        **{**defaults, **fields},
    )


def write_detector_bundle(directory, **fields):
    files = [encoded(picture(30, 20, seed=seed)) for seed in range(2)]
    raw = np.array([[file] for file in files], np.object_)
    pixels = ImagePreprocessor(STEP)(raw)["pixels"]
    golden = Golden(
        {"pixels": pixels}, dict(zip(("logits", "pred_boxes"), outputs(pixels), strict=True)), {"image": raw}
    )
    return write_bundle(
        directory, manifest(**fields), {"model.onnx": serialized(graph()), "golden.npz": golden.encode()}
    )
