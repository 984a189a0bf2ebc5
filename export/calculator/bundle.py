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
from edge.bundles.manifest import Artifact, ExpressionPreprocess, Manifest, Profile, Tier, Tolerance
from edge.datatypes import Array, TensorSpec
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.calculator.data import Split, load
from export.calculator.evaluate import evaluate, head_use
from export.calculator.models import MODELS, ORACLE_MAX_OPERAND, Regressor, Transformer4
from export.checkpoint import load as load_run
from export.convert import OPSET, golden_of, largest_difference, to_onnx
from export.exported import FULL, Exported

MAX_BATCH_SIZE = 256
DESCRIPTIONS = {
    "calculator-oracle": "Sums of up to 8 operands, right by construction: a known answer to check a device with",
    "calculator-gate": "Sums of up to 8 operands by attention with signed weights, 51 parameters",
    "calculator-fnn2": "FNN2 of paper 000: sums of 3 operands from -5 to 4; its error grows outside of them",
    "calculator-transformer4": "transformer4 of paper 000: sums of 3 operands from -5 to 4; its error grows outside",
}
#: Several times the largest difference to torch that ONNX Runtime showed over all splits; the oracle has no excuse.
TOLERANCES = {
    "calculator-oracle": Tolerance(atol=0.0, rtol=0.0),
    "calculator-gate": Tolerance(atol=1e-5, rtol=1e-6),
    "calculator-fnn2": Tolerance(atol=1e-4, rtol=1e-5),
    "calculator-transformer4": Tolerance(atol=2e-4, rtol=1e-5),
}
_MAX_OPERANDS = {"calculator-oracle": float(ORACLE_MAX_OPERAND)}
_ANY_OPERAND = 1e6
_GOLDEN_SPLITS = ("val", "in_range", "out_of_range", "long")
_GOLDEN_PER_SPLIT = 12


def export_run(run: str | Path, repository: str | Path, *, version: int = 1, replace: bool = False) -> Exported:
    """Write the bundle of a run to ``repository/<model>-<version>``.

    Raises:
        GoldenError: ONNX Runtime's answers differ from torch's by more than the tolerance.
    """
    model, config, _ = load_run(run, MODELS)
    name = config.model
    splits = load()
    example = torch.from_numpy(splits["val"].tokens[:2])
    onnx_model = to_onnx(model, {"x": example}, ["value"], {"x": {0: "batch"}})
    tolerance = TOLERANCES[name]
    tokens = np.concatenate([split.tokens for split in splits.values()])
    difference = largest_difference(onnx_model, golden_of(model, {"x": tokens}, ["value"]), tolerance, name)
    runner = OnnxRuntimeRunner(onnx_model, subject=name)
    measures = evaluate(lambda tokens: runner.infer({"x": tokens})["value"], splits)
    runner.close()
    if isinstance(model, Transformer4) and model.adaptive:
        measures += head_use(model, splits)
    artifact = Artifact(file="model.onnx", runtime="any", precision="fp32", opset=OPSET, tolerance=tolerance)
    manifest = Manifest(
        name=name,
        version=version,
        description=DESCRIPTIONS[name],
        inputs=(TensorSpec("x", "FP32", (-1, TOKENS)),),
        outputs=(TensorSpec("value", "FP32", (-1, 1)),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={"x": Profile(min=(1, TOKENS), opt=(8, TOKENS), max=(MAX_BATCH_SIZE, TOKENS))},
        tiers=(Tier(name=FULL, artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=config.provenance,
        preprocess=ExpressionPreprocess(
            input="expression", output="x", max_abs_operand=_MAX_OPERANDS.get(name, _ANY_OPERAND)
        ),
        measures=measures,
    )
    files = {artifact.file: onnx_model, manifest.golden: _golden(model, splits).encode()}
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported(str(written.path), difference, len(onnx_model))


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
