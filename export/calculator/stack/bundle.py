"""Export of a run of the stack calculator or a baseline to a bundle, compared with torch, and measured as served."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from edge.bundles.arithmetic import MAX_TOKENS
from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Artifact, Manifest, Profile, Tier, Tolerance
from edge.bundles.steps import ArithmeticPreprocess
from edge.datatypes import Array, TensorSpec
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exported import FULL, Exported
from export.bundle.latencies import with_latencies
from export.models.convert import OPSET, golden_of, largest_difference, to_onnx
from export.papers.calculator.stack import LSTM, STACK, TRANSFORMER
from export.papers.calculator.stack.data import Split, evaluate, load
from export.papers.calculator.stack.train import NETWORKS, served
from export.training.checkpoint import load as load_run

DESCRIPTIONS = {
    STACK: "Expressions with + - *, parentheses and decimals by a linear network with a stack, 123 parameters",
    LSTM: "An LSTM for expressions with + - * and parentheses; wrong on longer ones than it learnt from",
    TRANSFORMER: "A transformer for expressions with + - * and parentheses; wrong on longer ones than it learnt from",
}
MAX_BATCH_SIZE = 256
#: Several times the largest difference to torch over all splits; products of matrices round in another order.
TOLERANCE = Tolerance(atol=1e-5, rtol=1e-5)
MAX_ABS_OPERAND = 1e6
_GOLDEN_PER_SPLIT = 3
_COMPARED_PER_SPLIT = 100


def export_stack(run: str | Path, repository: str | Path, *, version: int = 1, replace: bool = False) -> Exported:
    """Write the bundle of a run to ``repository/<model>-<version>``.

    Raises:
        GoldenError: ONNX Runtime's answers differ from torch's by more than the tolerance.
    """
    model, config, metrics = load_run(run, NETWORKS)
    name, splits = config.model, load()
    network = served(model).eval()
    example = splits["val"]
    inputs = {"kinds": torch.from_numpy(example.kinds[:2]), "values": torch.from_numpy(example.values[:2])}
    onnx_model = to_onnx(network, inputs, ["value"], {input_name: {0: "batch"} for input_name in inputs})
    compared = golden_of(network, _tokens(splits, _COMPARED_PER_SPLIT)[0], ["value"])
    difference = largest_difference(onnx_model, compared, TOLERANCE, name)
    runner = OnnxRuntimeRunner(onnx_model, subject=name)

    def answers(kinds: Tensor, values: Tensor) -> Tensor:
        return torch.from_numpy(runner.infer({"kinds": kinds.numpy(), "values": values.numpy()})["value"])

    trained = tuple(measure for measure in metrics.measures if measure.split == "train")
    measures = (*trained, *evaluate(answers, splits))
    runner.close()
    artifact = Artifact(file="model.onnx", runtime="any", precision="fp32", opset=OPSET, tolerance=TOLERANCE)
    shapes = Profile(min=(1, MAX_TOKENS), opt=(8, MAX_TOKENS), max=(MAX_BATCH_SIZE, MAX_TOKENS))
    manifest = Manifest(
        name=name,
        version=version,
        description=DESCRIPTIONS[name],
        inputs=(TensorSpec("kinds", "INT64", (-1, MAX_TOKENS)), TensorSpec("values", "FP32", (-1, MAX_TOKENS))),
        outputs=(TensorSpec("value", "FP32", (-1, 1)),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={"kinds": shapes, "values": shapes},
        tiers=(Tier(name=FULL, artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=config.provenance,
        preprocess=ArithmeticPreprocess(
            input="expression", kinds="kinds", values="values", max_abs_operand=MAX_ABS_OPERAND
        ),
        measures=measures,
    )
    tokens, texts = _tokens(splits, _GOLDEN_PER_SPLIT)
    golden = golden_of(network, tokens, ["value"])
    golden = msgspec.structs.replace(golden, raw={"expression": np.array([[text] for text in texts], np.bytes_)})
    files = {artifact.file: onnx_model, manifest.golden: golden.encode()}
    manifest = with_latencies(manifest, files, measure=True)
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported.of(written, {artifact.file: difference})


def _tokens(splits: dict[str, Split], each: int) -> tuple[dict[str, Array], list[str]]:
    """Return the first ``each`` items of every split: the inputs of the graph, and the expressions."""
    parts = list(splits.values())
    tokens = {name: np.concatenate([getattr(part, name)[:each] for part in parts]) for name in ("kinds", "values")}
    return tokens, [text for part in parts for text in part.expressions[:each]]
