"""Export of a run to a bundle: ONNX, compared with torch on every split, and evaluated as it will be served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Artifact, Manifest, Measure, Profile, Tier, Tolerance
from edge.bundles.steps import ArithmeticPreprocess, ExpressionPreprocess, Preprocess
from edge.datatypes import Array, TensorSpec
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exported import FULL, Exported
from export.bundle.latencies import with_latencies
from export.data import expressions as data
from export.models.convert import OPSET, golden_of, largest_difference, to_onnx
from export.papers.calculator.benchmark import EVALUATED, evaluate
from export.papers.calculator.networks import NETWORKS
from export.papers.calculator.specs import SPECS
from export.papers.calculator.stack import STACK
from export.papers.calculator.stack import data as expressions
from export.papers.calculator.stack.machine import Scan, StackMachine
from export.training.checkpoint import load as load_run
from export.training.runs import RunConfig

MAX_BATCH_SIZE = 256
_GOLDEN_PER_SPLIT = 12
_STACK_DESCRIPTION = "Expressions with + - *, parentheses and decimals by a linear network with a stack, 123 parameters"
#: Several times the largest difference to torch over all splits; products of matrices round in another order.
_STACK_TOLERANCE = Tolerance(atol=1e-5, rtol=1e-5)
_STACK_GOLDEN_PER_SPLIT, _STACK_COMPARED_PER_SPLIT = 3, 100


def export_run(run: str | Path, repository: str | Path, *, version: int = 1, replace: bool = False) -> Exported:
    """Write the bundle of a run of a calculator of sums to ``repository/<model>-<version>``.

    Raises:
        GoldenError: ONNX Runtime's answers differ from torch's by more than the tolerance.
    """
    model, config, _ = load_run(run, NETWORKS)
    spec, splits = SPECS[config.model], data.load()
    parts = [splits[name] for name in EVALUATED]
    chosen = [np.linspace(0, len(part.expressions) - 1, _GOLDEN_PER_SPLIT).astype(int) for part in parts]
    rows = list(zip(parts, chosen, strict=True))

    def measures(runner: OnnxRuntimeRunner) -> tuple[Measure, ...]:
        return evaluate(lambda tokens: runner.infer({"x": tokens})["value"], splits)

    return _write(
        model,
        config,
        Path(repository) / f"{config.model}-{version}",
        description=spec.description,
        tolerance=spec.tolerance,
        preprocess=ExpressionPreprocess(input="expression", output="x", max_abs_operand=spec.max_abs_operand),
        compared={"x": np.concatenate([split.tokens for split in splits.values()])},
        golden={"x": np.concatenate([part.tokens[some] for part, some in rows])},
        texts=[part.expressions[row] for part, some in rows for row in some],
        measures=measures,
        version=version,
        replace=replace,
    )


def export_stack(run: str | Path, repository: str | Path, *, version: int = 1, replace: bool = False) -> Exported:
    """Write the bundle of a run of the stack calculator, as :func:`export_run` does."""
    model, config, metrics = load_run(run, {STACK: StackMachine})
    splits = expressions.load()

    def first(each: int) -> dict[str, Array]:
        parts = splits.values()
        return {name: np.concatenate([getattr(part, name)[:each] for part in parts]) for name in ("kinds", "values")}

    def measures(runner: OnnxRuntimeRunner) -> tuple[Measure, ...]:
        def answers(kinds: Tensor, values: Tensor) -> Tensor:
            return torch.from_numpy(runner.infer({"kinds": kinds.numpy(), "values": values.numpy()})["value"])

        trained = tuple(measure for measure in metrics.measures if measure.split == "train")
        return (*trained, *expressions.evaluate(answers, splits))

    return _write(
        Scan(model),
        config,
        Path(repository) / f"{config.model}-{version}",
        description=_STACK_DESCRIPTION,
        tolerance=_STACK_TOLERANCE,
        preprocess=ArithmeticPreprocess(input="expression", kinds="kinds", values="values", max_abs_operand=1e6),
        compared=first(_STACK_COMPARED_PER_SPLIT),
        golden=first(_STACK_GOLDEN_PER_SPLIT),
        texts=[text for part in splits.values() for text in part.expressions[:_STACK_GOLDEN_PER_SPLIT]],
        measures=measures,
        version=version,
        replace=replace,
    )


def _write(
    network: nn.Module,
    config: RunConfig,
    bundle: Path,
    *,
    description: str,
    tolerance: Tolerance,
    preprocess: Preprocess,
    compared: dict[str, Array],
    golden: dict[str, Array],
    texts: list[str],
    measures: Callable[[OnnxRuntimeRunner], tuple[Measure, ...]],
    version: int,
    replace: bool,
) -> Exported:
    """Write a bundle; ONNX Runtime is ``compared`` with torch on some inputs, and ``texts`` are those of ``golden``."""
    network.eval()
    example = {one: torch.from_numpy(array[:2]) for one, array in golden.items()}
    onnx_model = to_onnx(network, example, ["value"], {one: {0: "batch"} for one in golden})
    difference = largest_difference(onnx_model, golden_of(network, compared, ["value"]), tolerance, config.model)
    runner = OnnxRuntimeRunner(onnx_model, subject=config.model)
    measured = measures(runner)
    runner.close()
    artifact = Artifact(file="model.onnx", runtime="any", precision="fp32", opset=OPSET, tolerance=tolerance)
    kinds = {one: ("INT64" if array.dtype == np.int64 else "FP32", array.shape[1]) for one, array in golden.items()}
    manifest = Manifest(
        name=config.model,
        version=version,
        description=description,
        inputs=tuple(TensorSpec(one, datatype, (-1, tokens)) for one, (datatype, tokens) in kinds.items()),
        outputs=(TensorSpec("value", "FP32", (-1, 1)),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={
            one: Profile(min=(1, tokens), opt=(8, tokens), max=(MAX_BATCH_SIZE, tokens))
            for one, (_, tokens) in kinds.items()
        },
        tiers=(Tier(name=FULL, artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=config.provenance,
        preprocess=preprocess,
        measures=measured,
    )
    raw = {"expression": np.array([[text] for text in texts], np.bytes_)}
    answers = msgspec.structs.replace(golden_of(network, golden, ["value"]), raw=raw)
    files = {artifact.file: onnx_model, manifest.golden: answers.encode()}
    manifest = with_latencies(manifest, files, measure=True)
    written = write_bundle(bundle, manifest, files, replace=replace)
    return Exported.of(written, {artifact.file: difference})
