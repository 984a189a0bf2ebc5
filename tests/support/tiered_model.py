"""A model of three tiers that differ in nothing but the time that they take."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from tests.support.models import graph_of, manifest_of, serialized, tier_of

WIDTH = 1024
#: Layers of each tier; the time of a request is about proportional.
LAYERS = {"full": 480, "half": 240, "eighth": 60}


def tier_onnx(layers: int) -> bytes:
    """x [batch, 1024] through so many layers that change nothing: the identity."""
    names = ["x", *(f"x{index}" for index in range(1, layers)), "y"]
    nodes = " ".join(f"{after} = MatMul({before}, eye)" for before, after in pairwise(names))
    text = f"tier (float[batch, {WIDTH}] x) => (float[batch, {WIDTH}] y) {{ {nodes} }}"
    return serialized(graph_of(text, eye=np.eye(WIDTH, dtype=np.float32)))


def write_tiered_bundle(
    directory: Path, max_batch_size: int = 4, layers: Mapping[str, int] = LAYERS, **fields: Any
) -> Bundle:
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    manifest = manifest_of(
        "tiered",
        (TensorSpec("x", "FP32", (-1, WIDTH)),),
        (TensorSpec("y", "FP32", (-1, WIDTH)),),
        {"x": Profile(min=(1, WIDTH), opt=(1, WIDTH), max=(max_batch_size, WIDTH))},
        max_batch_size=max_batch_size,
        tiers=tuple(tier_of(name, f"{name}.onnx", atol=1e-6) for name in layers),
        **fields,
    )
    files = {f"{name}.onnx": tier_onnx(number) for name, number in layers.items()}
    return write_bundle(directory, manifest, {**files, "golden.npz": Golden({"x": x}, {"y": x}).encode()})
