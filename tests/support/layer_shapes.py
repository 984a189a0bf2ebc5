"""Directory of layer shapes as `fewheads shapes` writes it, of matrix products only, made without torch."""

import msgspec
import numpy as np

from edge.bench.layer_latencies import Shape
from edge.bench.profile import ShapeSet
from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from tests.support.models import graph_of, manifest_of, serialized, tier_of

DIM, LENGTHS = 16, (4, 8)
SHAPES = (Shape(2, 8, 512), Shape(2, 8, 128), Shape(2, 8, 16))
MODEL = {"architecture": "bert", "dim": str(DIM), "dense": SHAPES[0].name, "embeddings": "100"}


def write_layer_shapes(directory):
    """Write two products for each shape, in FP32 and for any runtime."""
    for shape in SHAPES:
        _write(directory / shape.name, shape.ffn_dim)
    _write(directory / "floor", 1)
    _write(directory / "rest", 64)
    shapes = ShapeSet(model=MODEL, dense=SHAPES[0], shapes=SHAPES, lengths=LENGTHS)
    (directory / "shapes.json").write_bytes(msgspec.json.encode(shapes))
    return directory


def _write(path, units):
    weights = np.random.default_rng(0).normal(size=(DIM, units)).astype(np.float32) / units
    x = np.random.default_rng(1).normal(size=(1, LENGTHS[-1], DIM)).astype(np.float32)
    graph = graph_of(
        f"{path.name.replace('-', '_')} (float[1, tokens, {DIM}] x, int64[1, tokens] mask) => "
        f"(float[1, tokens, {DIM}] y) {{ hidden = MatMul(x, up) y = MatMul(hidden, down) }}",
        up=weights,
        down=np.ascontiguousarray(weights.T),
    )
    low, high = LENGTHS
    manifest = manifest_of(
        path.name,
        (TensorSpec("x", "FP32", (1, -1, DIM)), TensorSpec("mask", "INT64", (1, -1))),
        (TensorSpec("y", "FP32", (1, -1, DIM)),),
        {
            "x": Profile(min=(1, low, DIM), opt=(1, high, DIM), max=(1, high, DIM)),
            "mask": Profile(min=(1, low), opt=(1, high), max=(1, high)),
        },
        tiers=(tier_of("x1", atol=1e-3, rtol=1e-3),),
    )
    golden = Golden({"x": x, "mask": np.ones((1, high), dtype=np.int64)}, {"y": x @ weights @ weights.T})
    write_bundle(path, manifest, {"model.onnx": serialized(graph), "golden.npz": golden.encode()})
