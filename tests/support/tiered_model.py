"""A model of three tiers that differ in nothing but the time that they take."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Profile, Provenance, Tier, Tolerance
from edge.datatypes import TensorSpec
from tests.support.models import serialized

WIDTH = 1024
#: Layers of each tier; the time of a request is about proportional.
LAYERS = {"full": 480, "half": 240, "eighth": 60}


def tier_onnx(layers: int) -> bytes:
    """x [batch, 1024] through so many layers that change nothing: the identity."""
    names = ["x", *(f"x{index}" for index in range(1, layers)), "y"]
    nodes = [helper.make_node("MatMul", [before, "eye"], [after]) for before, after in pairwise(names)]
    shape = ["batch", WIDTH]
    graph = helper.make_graph(
        nodes,
        "tier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "eye")],
    )
    return serialized(graph)


def write_tiered_bundle(directory: Path, max_batch_size: int = 4) -> Bundle:
    artifact = {"runtime": "any", "precision": "fp32", "opset": 17, "tolerance": Tolerance(atol=1e-6, rtol=0)}
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    manifest = Manifest(
        name="tiered",
        version=1,
        description="The identity, slowly.",
        inputs=(TensorSpec("x", "FP32", (-1, WIDTH)),),
        outputs=(TensorSpec("y", "FP32", (-1, WIDTH)),),
        max_batch_size=max_batch_size,
        profile={"x": Profile(min=(1, WIDTH), opt=(1, WIDTH), max=(max_batch_size, WIDTH))},
        tiers=tuple(Tier(name=name, artifacts=(Artifact(file=f"{name}.onnx", **artifact),)) for name in LAYERS),
        golden="golden.npz",
        files={},
        provenance=Provenance(created="2026-01-01T00:00:00Z", trainer="none", data="none"),
    )
    files = {f"{name}.onnx": tier_onnx(layers) for name, layers in LAYERS.items()}
    return write_bundle(directory, manifest, {**files, "golden.npz": Golden({"x": x}, {"y": x}).encode()})
