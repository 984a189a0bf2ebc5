"""Heads of the letters model with known results: each adds a number to the next letter, modulo 27."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Profile, Tier, Tolerance
from edge.bundles.programs import HeadBase, HeadProgram
from edge.datatypes import TensorSpec
from tests.support.letters_model import LETTERS, MAX_BATCH_SIZE
from tests.support.models import graph_of, manifest_of, serialized

#: What the likeliest letter's successor gains; logits differ by 26 at most.
GAIN = 100.0
_SIZE = len(LETTERS)

GRAPH = """head (float[N, V] logits, float[G, W, V] keys, float[G, V, W] values, float[G] temperatures,
        float[N, 1] alpha)
    => (float[N, V] moved) {
    by_group = Unsqueeze(temperatures, inner)
    scaled = Div(logits, by_group)
    probabilities = Softmax<axis = -1>(scaled)
    means = MatMul(probabilities, values)
    added = MatMul(means, keys)
    sum = ReduceSum<keepdims = 0>(added, first)
    change = Mul(alpha, sum)
    moved = Add(logits, change)
}"""


def write_letters_head(
    directory: Path, base: Bundle, name: str, shift: int, *, usual_alpha: float = 1.0, version: int = 1
) -> Bundle:
    """Write a head that adds ``shift`` to each next letter, unless a small alpha leaves it as it is."""
    likeliest = np.eye(_SIZE, dtype=np.float32)  # the temperature makes it the only one
    keys = GAIN * np.roll(likeliest, shift, axis=1)
    tensors = io.BytesIO()
    layer = {"keys": keys[None], "values": likeliest[None], "temperatures": np.array([0.001], np.float32)}
    np.savez(tensors, **{f"0/{field}": array for field, array in layer.items()})
    logits = -np.abs(np.arange(_SIZE, dtype=np.float32) - np.array([[3], [26]], np.float32))
    alpha = np.array([[1], [0.5]], np.float32)
    golden = Golden({"logits": logits, "alpha": alpha}, {"moved": logits + alpha * keys[[3, 26]]})
    part = Golden({**golden.inputs, **layer}, golden.outputs)
    shapes = {"logits": (-1, -1), "keys": (-1, -1, -1), "values": (-1, -1, -1), "temperatures": (-1,), "alpha": (-1, 1)}
    sizes = {"logits": (0, _SIZE), "keys": (1, _SIZE, _SIZE), "values": (1, _SIZE, _SIZE), "temperatures": (1,)}
    sizes["alpha"] = (0, 1)
    profile = {field: _profile(size) for field, size in sizes.items()}
    artifact = Artifact(
        file="head.onnx", runtime="any", precision="fp32", opset=17, role="head", golden="head.golden.npz",
        tolerance=Tolerance(atol=1e-4, rtol=0), profile=profile, outputs=(TensorSpec("moved", "FP32", (-1, -1)),),
        inputs=tuple(TensorSpec(field, "FP32", shape) for field, shape in shapes.items()),
    )  # fmt: skip
    full = base.manifest.tiers[0].artifacts[0].file
    fields = ("logits", "alpha", "moved", "keys", "values", "temperatures")
    program = HeadProgram(
        base=HeadBase(name=base.manifest.name, version=base.manifest.version, sha256=base.manifest.files[full].sha256),
        tensors="tensors.npz", usual_alpha=usual_alpha, **dict(zip(fields, fields, strict=True)),
    )  # fmt: skip
    manifest = manifest_of(
        name,
        (TensorSpec("logits", "FP32", (-1, _SIZE)), TensorSpec("alpha", "FP32", (-1, 1))),
        (TensorSpec("moved", "FP32", (-1, _SIZE)),),
        {field: profile[field] for field in ("logits", "alpha")},
        version=version,
        max_batch_size=MAX_BATCH_SIZE,
        tiers=(Tier(name="full", artifacts=(artifact,)),),
        program=program,
    )
    files = {
        "head.onnx": serialized(graph_of(GRAPH, inner=np.array([1, 2]), first=np.array([0]))),
        "tensors.npz": tensors.getvalue(),
        "golden.npz": golden.encode(),
        "head.golden.npz": part.encode(),
    }
    return write_bundle(directory, manifest, files)


def _profile(size: tuple[int, ...]) -> Profile:
    """Return the profile of a tensor; 0 stands for its rows."""
    least, usual, most = (tuple(one or rows for one in size) for rows in (1, 2, MAX_BATCH_SIZE))
    return Profile(min=least, opt=usual, max=most)
