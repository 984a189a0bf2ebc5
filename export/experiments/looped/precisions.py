"""Sizes and precisions of the looped layer side by side: errors, loops until they settle, and times of a step.

``python -m export.experiments.looped.precisions RUN... --out FILE`` measures, the full model first; ``--table FILE``
prints a record. All precisions run in ONNX Runtime on the CPU, which rounds as the files say; TensorRT sums otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import torch

from edge.cli.output import print_table
from edge.datatypes import Array
from edge.files import write_whole
from edge.profiling.timing import times_in_turns
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.checkpoint import load
from export.intervals import interval, mean
from export.looped import MODEL
from export.looped.functions import FUNCTION_CLASSES, draw_prompts
from export.looped.graphs import STEP_INPUTS, Embed, step_feeds, step_onnx
from export.looped.model import PromptTransformer
from export.looped.seeds import EVALUATION, generator_of
from export.looped.solvers import Trajectory, stopped
from export.looped.tier import MAX_LOOPS, TOLERANCE, int8_steps, usual_steps
from export.looped.train import MEASURED_LOOPS, PROMPTS, create
from export.processor import Processor, processor

BATCHES = {1: 300, 8: 300, 64: 100}  # rows: calls


class Measured(msgspec.Struct, frozen=True):
    """One run in one precision; errors are squared and divided by the variance of the values.

    Attributes:
        precision: of the step, and the runtime that the file is made for.
        errors: after each of :data:`export.looped.train.MEASURED_LOOPS`, with its 95 % interval.
        settled_error, loops: error and mean loops at the tolerance, within the budget of a request.
        never: share of prompts that do not reach the tolerance within that budget.
        floor: median residual after the last loop, below which no tolerance is reached.
        milliseconds: median time of a step on one thread, by rows; all runs and precisions take turns.
        ratios: median of the ratios of neighbouring calls, those of the first run in FP32 over these.
    """

    run: str
    layers: str
    parameters: int
    precision: str
    errors: dict[int, tuple[float, float, float]]
    settled_error: float
    loops: float
    never: float
    floor: float
    milliseconds: dict[int, float]
    ratios: dict[int, float]


class Record(msgspec.Struct, frozen=True):
    """A comparison, and what it was measured with."""

    prompts: int
    tolerance: float
    budget: int
    processor: Processor
    onnxruntime: str
    measured: tuple[Measured, ...]


def measure(runs: Iterable[Path]) -> Record:
    """Measure runs of one function class and size; the first is the full model."""
    models, runners = {}, {}
    for run in runs:
        model, config, _ = load(run, {MODEL: create})
        models[run.name] = model, config.arguments["function"]
        plain = step_onnx(model)
        for step in (*usual_steps(plain), *int8_steps(plain, *models[run.name])):
            key = run.name, f"{step.precision} for {step.runtime}"
            runners[key] = OnnxRuntimeRunner(step.data, subject=" in ".join(key))
    times = {rows: _times(runners, step_feeds(model.config, rows), calls) for rows, calls in BATCHES.items()}
    measured = tuple(
        _measured(run, precision, *models[run], runner, {rows: of[run, precision] for rows, of in times.items()})
        for (run, precision), runner in runners.items()
    )
    return Record(PROMPTS, TOLERANCE, MAX_LOOPS, processor(), onnxruntime.__version__, measured)


def _measured(
    run: str,
    precision: str,
    model: PromptTransformer,
    function: str,
    runner: OnnxRuntimeRunner,
    times: Mapping[int, tuple[float, float]],
) -> Measured:
    config, shape = model.config, model.config.shapes[0]
    xs, ys = draw_prompts(function, PROMPTS, config.points, config.dims, generator_of(EVALUATION))
    path = _path(runner, model, xs, ys)

    def squared(predictions: Array) -> Array:
        errors: Array = (predictions - ys[:, -1].numpy()) ** 2 / FUNCTION_CLASSES[function].normaliser(config.dims)
        return errors

    after = {loops: squared(path.predictions[loops - 1]) for loops in MEASURED_LOOPS}
    budget = Trajectory(path.predictions[:MAX_LOOPS], path.residuals[:MAX_LOOPS])
    end = stopped(budget, TOLERANCE)
    return Measured(
        run=run,
        layers=f"{shape.num_heads} heads of {shape.head_dim}, {shape.ffn_dim} units",
        parameters=model.parameter_count,
        precision=precision,
        errors={loops: (float(errors.mean()), *interval(mean, errors)) for loops, errors in after.items()},
        settled_error=float(squared(end.predictions).mean()),
        loops=float(end.loops.mean()),
        never=float((budget.residuals > TOLERANCE).all(axis=0).mean()),
        floor=float(np.median(path.residuals[-1])),
        milliseconds={rows: found[0] for rows, found in times.items()},
        ratios={rows: found[1] for rows, found in times.items()},
    )


def _path(runner: OnnxRuntimeRunner, model: PromptTransformer, xs: torch.Tensor, ys: torch.Tensor) -> Trajectory:
    with torch.no_grad():
        prompt, state = (tensor.numpy() for tensor in Embed(model)(xs, ys[:, :-1]))
    last = np.full((len(xs), 1), prompt.shape[1] - 1, np.int64)
    predictions, residuals = [], []
    for _ in range(max(MEASURED_LOOPS)):
        outputs = runner.infer(dict(zip(STEP_INPUTS, (state, prompt, last), strict=True)))
        state = outputs["next_state"]
        predictions.append(outputs["prediction"][:, 0])
        residuals.append(outputs["residual"][:, 0])
    return Trajectory(np.stack(predictions), np.stack(residuals))


def _times(
    runners: Mapping[tuple[str, str], OnnxRuntimeRunner], feeds: dict[str, Array], calls: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the milliseconds of a step, and how many times as fast as the first runner it is."""
    seconds = times_in_turns(runners, feeds, calls)
    full = next(iter(seconds.values()))
    return {key: (float(1e3 * np.median(one)), float(np.median(full / one))) for key, one in seconds.items()}


def show(record: Record) -> None:
    """Print the table of a record."""
    at = f"at {record.tolerance:g}"
    columns = ("run", "layers", "parameters", "precision", *(f"{loops} loops" for loops in MEASURED_LOOPS))
    columns += (at, f"loops {at}", "floor", *(f"x, {rows} rows" for rows in BATCHES))
    rows = [
        (
            *(one.run, one.layers, one.parameters, one.precision),
            *(f"{one.errors[loops][0]:.4f}" for loops in MEASURED_LOOPS),
            *(f"{one.settled_error:.4f}", f"{one.loops:.1f}", f"{one.floor:.1g}"),
            *(f"{ratio:.2f}" for ratio in one.ratios.values()),
        )
        for one in record.measured
    ]
    first, where = record.measured[0].run, f"{record.processor.name}, ONNX Runtime {record.onnxruntime}, one thread"
    title = f"Squared error / normaliser, {record.prompts} prompts, and times as fast as {first} in FP32 ({where})"
    print_table(title, columns, rows)


def main() -> None:
    """Measure runs, or print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="runs of one function class, the full model first")
    parser.add_argument("--out", type=Path, help="the record to write")
    parser.add_argument("--table", type=Path, help="print this record instead")
    options = parser.parse_args()
    if bool(options.runs) == bool(options.table):
        parser.error("give runs, or --table")
    torch.set_num_threads(1)
    if options.table:
        record = msgspec.json.decode(options.table.read_bytes(), type=Record)
    else:
        record = measure(options.runs)
        if options.out:
            write_whole(options.out, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    show(record)


if __name__ == "__main__":
    main()
