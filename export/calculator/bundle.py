"""Export of a run to a bundle: ONNX, compared with torch on every split, and evaluated as it will be served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from edge.bundles.bundle import write_bundle
from edge.bundles.expression import TOKENS
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Profile, Tier
from edge.bundles.steps import ExpressionPreprocess
from edge.datatypes import Array, TensorSpec
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exported import FULL, Exported
from export.bundle.latencies import with_latencies
from export.models.convert import OPSET, golden_of, largest_difference, to_onnx
from export.papers.calculator.benchmark import evaluate, head_use
from export.papers.calculator.data import Split, load
from export.papers.calculator.networks import NETWORKS, Regressor, Transformer
from export.papers.calculator.specs import SPECS
from export.training.checkpoint import load as load_run

MAX_BATCH_SIZE = 256
_GOLDEN_SPLITS = ("val", "in_range", "out_of_range", "long")
_GOLDEN_PER_SPLIT = 12


def export_run(run: str | Path, repository: str | Path, *, version: int = 1, replace: bool = False) -> Exported:
    """Write the bundle of a run to ``repository/<model>-<version>``.

    Raises:
        GoldenError: ONNX Runtime's answers differ from torch's by more than the tolerance.
    """
    model, config, _ = load_run(run, NETWORKS)
    name, spec = config.model, SPECS[config.model]
    splits = load()
    example = torch.from_numpy(splits["val"].tokens[:2])
    onnx_model = to_onnx(model, {"x": example}, ["value"], {"x": {0: "batch"}})
    tokens = np.concatenate([split.tokens for split in splits.values()])
    difference = largest_difference(onnx_model, golden_of(model, {"x": tokens}, ["value"]), spec.tolerance, name)
    runner = OnnxRuntimeRunner(onnx_model, subject=name)
    measures = evaluate(lambda tokens: runner.infer({"x": tokens})["value"], splits)
    runner.close()
    if isinstance(model, Transformer) and model.adaptive:
        measures += head_use(model, splits)
    artifact = Artifact(file="model.onnx", runtime="any", precision="fp32", opset=OPSET, tolerance=spec.tolerance)
    manifest = Manifest(
        name=name,
        version=version,
        description=spec.description,
        inputs=(TensorSpec("x", "FP32", (-1, TOKENS)),),
        outputs=(TensorSpec("value", "FP32", (-1, 1)),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={"x": Profile(min=(1, TOKENS), opt=(8, TOKENS), max=(MAX_BATCH_SIZE, TOKENS))},
        tiers=(Tier(name=FULL, artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=config.provenance,
        preprocess=ExpressionPreprocess(input="expression", output="x", max_abs_operand=spec.max_abs_operand),
        measures=measures,
    )
    files = {artifact.file: onnx_model, manifest.golden: _golden(model, splits).encode()}
    manifest = with_latencies(manifest, files, measure=True)
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported.of(written, {artifact.file: difference})


def _golden(model: Regressor, splits: Mapping[str, Split]) -> Golden:
    texts: list[str] = []
    tokens: list[Array] = []
    for name in _GOLDEN_SPLITS:
        split = splits[name]
        rows = np.linspace(0, len(split.expressions) - 1, _GOLDEN_PER_SPLIT).astype(int)
        texts += [split.expressions[row] for row in rows]
        tokens.append(split.tokens[rows])
    golden = golden_of(model, {"x": np.concatenate(tokens)}, ["value"])
    return msgspec.structs.replace(golden, raw={"expression": np.array([[text] for text in texts], dtype=np.bytes_)})
