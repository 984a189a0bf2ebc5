"""An image classifier, small enough to read: its logits are the mean brightness of the upper and the lower half."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import Profile
from edge.bundles.steps import ImagePreprocess, LabelPostprocess
from edge.datatypes import TensorSpec
from tests.support.models import graph_of, manifest_of, serialized, tier_of

NAME = "halves"
SIZE, MAX_BATCH_SIZE = 8, 4
LABELS = ("upper", "lower")
_LIMITS = {"max_bytes": 2**25, "max_pixels": 20_000_000}
STEP = ImagePreprocess(input="image", output="pixels", size=SIZE, colours="grey", mean=(0.5,), std=(0.5,), **_LIMITS)
#: Means of the pixels' rows, [64, 2].
WEIGHTS = np.repeat(np.eye(2, dtype=np.float32), SIZE * SIZE // 2, axis=0) * (2 / SIZE**2)


def encoded(image, kind="PNG", **options):
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture(width, height, seed=0):
    """Return noise that is smooth enough to survive a JPEG."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def bright(upper, lower, width=12, height=12):
    """Return a grey image whose halves have these brightnesses, 0 to 255."""
    pixels = np.full((height, width), lower, np.uint8)
    pixels[: height // 2] = upper
    return Image.fromarray(pixels)


def logits(files):
    pixels = ImagePreprocessor(STEP)(np.array([[file] for file in files], np.object_))["pixels"]
    return pixels.reshape(len(files), -1) @ WEIGHTS


def write_image_bundle(directory, difference=0.0):
    """Write the bundle; its golden pixels differ by so much from those of its golden images."""
    graph = graph_of(
        f"""halves (float[batch, 1, {SIZE}, {SIZE}] pixels) => (float[batch, 2] logits) {{
            flat = Flatten<axis = 1>(pixels)
            logits = MatMul(flat, weights)
        }}""",
        weights=WEIGHTS,
    )
    files = [encoded(bright(200, 10)), encoded(bright(0, 90), "JPEG"), encoded(bright(40, 30, 20, 12))]
    raw = np.array([[file] for file in files], np.object_)
    pixels = ImagePreprocessor(STEP)(raw)["pixels"] + np.float32(difference)
    golden = Golden({"pixels": pixels}, {"logits": pixels.reshape(len(files), -1) @ WEIGHTS}, {"image": raw})
    return write_bundle(directory, manifest(), {"model.onnx": serialized(graph), "golden.npz": golden.encode()})


def manifest():
    sizes = (1, SIZE, SIZE)
    return manifest_of(
        NAME,
        (TensorSpec("pixels", "FP32", (-1, *sizes)),),
        (TensorSpec("logits", "FP32", (-1, 2)),),
        {"pixels": Profile(min=(1, *sizes), opt=(1, *sizes), max=(MAX_BATCH_SIZE, *sizes))},
        max_batch_size=MAX_BATCH_SIZE,
        tiers=(tier_of(atol=1e-4),),
        preprocess=STEP,
        postprocess=LabelPostprocess(logits="logits", output="label", labels=LABELS),
    )
