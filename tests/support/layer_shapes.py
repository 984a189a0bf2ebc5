"""Directory of layer shapes as `fewheads shapes` writes it, of matrix products only, made without torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Profile, Provenance, Tier, Tolerance
from edge.datatypes import TensorSpec
from edge.profiling.shapes import ShapeSet
from edge.profiling.table import Shape
from tests.support.models import serialized

DIM, LENGTHS = 16, (4, 8)
SHAPES = (Shape(2, 8, 512), Shape(2, 8, 128), Shape(2, 8, 16))
MODEL = {"architecture": "bert", "dim": str(DIM), "dense": SHAPES[0].name, "embeddings": "100"}


def write_layer_shapes(directory: Path) -> Path:
    """Write two products for each shape, in FP32 and for any runtime."""
    for shape in SHAPES:
        _write(directory / shape.name, shape.ffn_dim)
    _write(directory / "floor", 1)
    _write(directory / "rest", 64)
    shapes = ShapeSet(model=MODEL, dense=SHAPES[0], shapes=SHAPES, lengths=LENGTHS)
    (directory / "shapes.json").write_bytes(msgspec.json.encode(shapes))
    return directory


def _write(path: Path, units: int) -> None:
    weights = np.random.default_rng(0).normal(size=(DIM, units)).astype(np.float32) / units
    x = np.random.default_rng(1).normal(size=(1, LENGTHS[-1], DIM)).astype(np.float32)
    shape = [1, "tokens", DIM]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "up"], ["hidden"], name="up_product"),
            helper.make_node("MatMul", ["hidden", "down"], ["y"], name="down_product"),
        ],
        path.name,
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("mask", TensorProto.INT64, shape[:2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(array, name)
            for name, array in (("up", weights), ("down", np.ascontiguousarray(weights.T)))
        ],
    )
    low, high = LENGTHS
    artifact = Artifact(
        file="model.onnx", runtime="any", precision="fp32", opset=17, tolerance=Tolerance(atol=1e-3, rtol=1e-3)
    )
    manifest = Manifest(
        name=path.name,
        version=1,
        description="Two products.",
        inputs=(TensorSpec("x", "FP32", (1, -1, DIM)), TensorSpec("mask", "INT64", (1, -1))),
        outputs=(TensorSpec("y", "FP32", (1, -1, DIM)),),
        max_batch_size=0,
        profile={
            "x": Profile(min=(1, low, DIM), opt=(1, high, DIM), max=(1, high, DIM)),
            "mask": Profile(min=(1, low), opt=(1, high), max=(1, high)),
        },
        tiers=(Tier(name="x1", artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=Provenance(created="2026-01-01T00:00:00Z", trainer="none: random weights", data="none"),
    )
    inputs = {"x": x, "mask": np.ones((1, high), dtype=np.int64)}
    golden = Golden(inputs, {"y": x @ weights @ weights.T})
    write_bundle(path, manifest, {"model.onnx": serialized(graph), "golden.npz": golden.encode()})
