"""Bundles of the calculators: ONNX, compared with torch on every split, and evaluated as it will be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from edge.bundles.manifest import Artifact, Manifest, Measure, Profile, Tier, Tolerance
from edge.bundles.steps import ArithmeticPreprocess, ExpressionPreprocess, Preprocess
from edge.datatypes import Array, TensorSpec, datatype_of
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exportable import Contents, ExportedArtifact, OnRows
from export.bundle.exported import FULL
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
_FILE = "model.onnx"
_GOLDEN_PER_SPLIT = 12
_STACK_DESCRIPTION = "Expressions with + - *, parentheses and decimals by a linear network with a stack, 123 parameters"
#: Several times the largest difference to torch over all splits; products of matrices round in another order.
_STACK_TOLERANCE = Tolerance(atol=1e-5, rtol=1e-5)
_STACK_GOLDEN_PER_SPLIT, _STACK_COMPARED_PER_SPLIT = 3, 100


class SumCalculator(NamedTuple):
    """A run of a calculator of sums: an :class:`export.bundle.exportable.Exportable`."""

    run: Path

    def contents(self, on_rows: OnRows | None) -> Contents:
        """Return the bundle, with the measures of its file on all splits, or without ``on_rows`` those of the run."""
        model, config, metrics = load_run(self.run, NETWORKS)
        spec, splits = SPECS[config.model], data.load()
        parts = [splits[name] for name in EVALUATED]
        chosen = [np.linspace(0, len(part.expressions) - 1, _GOLDEN_PER_SPLIT).astype(int) for part in parts]
        rows = list(zip(parts, chosen, strict=True))

        def measures(runner: OnnxRuntimeRunner) -> tuple[Measure, ...]:
            return evaluate(lambda tokens: runner.infer({"x": tokens})["value"], splits)

        return _contents(
            model,
            config,
            description=spec.description,
            tolerance=spec.tolerance,
            preprocess=ExpressionPreprocess(input="expression", output="x", max_abs_operand=spec.max_abs_operand),
            compared={"x": np.concatenate([split.tokens for split in splits.values()])},
            golden={"x": np.concatenate([part.tokens[some] for part, some in rows])},
            texts=[part.expressions[row] for part, some in rows for row in some],
            measures=measures if on_rows else lambda runner: metrics.measures,
        )


class StackCalculator(NamedTuple):
    """A run of the stack calculator, as :class:`SumCalculator`."""

    run: Path

    def contents(self, on_rows: OnRows | None) -> Contents:
        """Return the bundle, with the measures of its file on all splits, or without ``on_rows`` those of the run."""
        model, config, metrics = load_run(self.run, {STACK: StackMachine})
        splits = expressions.load()

        def first(each: int) -> dict[str, Array]:
            parts = splits.values()
            return {
                name: np.concatenate([getattr(part, name)[:each] for part in parts]) for name in ("kinds", "values")
            }

        def measures(runner: OnnxRuntimeRunner) -> tuple[Measure, ...]:
            def answers(kinds: Tensor, values: Tensor) -> Tensor:
                return torch.from_numpy(runner.infer({"kinds": kinds.numpy(), "values": values.numpy()})["value"])

            trained = tuple(measure for measure in metrics.measures if measure.split == "train")
            return (*trained, *expressions.evaluate(answers, splits))

        return _contents(
            Scan(model),
            config,
            description=_STACK_DESCRIPTION,
            tolerance=_STACK_TOLERANCE,
            preprocess=ArithmeticPreprocess(input="expression", kinds="kinds", values="values", max_abs_operand=1e6),
            compared=first(_STACK_COMPARED_PER_SPLIT),
            golden=first(_STACK_GOLDEN_PER_SPLIT),
            texts=[text for part in splits.values() for text in part.expressions[:_STACK_GOLDEN_PER_SPLIT]],
            measures=measures if on_rows else lambda runner: metrics.measures,
        )


def _contents(
    network: nn.Module,
    config: RunConfig,
    *,
    description: str,
    tolerance: Tolerance,
    preprocess: Preprocess,
    compared: Mapping[str, Array],
    golden: Mapping[str, Array],
    texts: Sequence[str],
    measures: Callable[[OnnxRuntimeRunner], tuple[Measure, ...]],
) -> Contents:
    """Return a bundle; ONNX Runtime is ``compared`` with torch on some inputs, and ``texts`` are the golden ones."""
    example = {name: torch.from_numpy(array[:2]) for name, array in golden.items()}
    model = to_onnx(network, example, ["value"], {name: {0: "batch"} for name in golden})
    difference = largest_difference(model, golden_of(network, compared, ["value"]), tolerance, config.model)
    with closing(OnnxRuntimeRunner(model, subject=config.model)) as runner:
        measured = measures(runner)
    artifact = Artifact(file=_FILE, runtime="any", precision="fp32", opset=OPSET, tolerance=tolerance)
    tokens = {name: array.shape[1] for name, array in golden.items()}
    manifest = Manifest(
        name=config.model,
        version=1,
        description=description,
        inputs=tuple(TensorSpec(name, datatype_of(array), (-1, tokens[name])) for name, array in golden.items()),
        outputs=(TensorSpec("value", "FP32", (-1, 1)),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={
            name: Profile(min=(1, width), opt=(8, width), max=(MAX_BATCH_SIZE, width)) for name, width in tokens.items()
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
    return Contents(manifest, {_FILE: ExportedArtifact(artifact, model, difference), manifest.golden: answers})
