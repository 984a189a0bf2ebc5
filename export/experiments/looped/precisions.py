"""Sizes and precisions of the looped layer side by side: errors, loops until they settle, and times of a step.

``python -m export.papers.looped.precisions RUN... --out FILE`` measures, the full model first; ``--table FILE``
prints a record. All precisions run in ONNX Runtime on the CPU, which rounds as the files say; TensorRT accumulates in
another order. Prompts are computed together as in the server, which computes those of dynamic INT8 one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import torch

from edge.bench.timing import times_in_turns
from edge.cli.output import print_table
from edge.datatypes import Array
from edge.errors import FewheadsError, Raw, UsageError
from edge.files import write_whole
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.papers.looped import MODEL
from export.papers.looped.functions import draw_prompts, squared_errors
from export.papers.looped.graphs import STEP_INPUTS, Embed, step_feeds, step_onnx
from export.papers.looped.model import PromptTransformer
from export.papers.looped.seeds import EVALUATION, generator_of
from export.papers.looped.solvers import Trajectory, stopped
from export.papers.looped.tier import MAX_LOOPS, TOLERANCE, int8_steps, usual_steps
from export.papers.looped.train import MEASURED_LOOPS, PROMPTS, create
from export.training.checkpoint import load
from export.training.intervals import interval, mean
from export.training.provenance import Processor, processor

BATCHES = {1: 300, 8: 300, 64: 100}  # rows: calls


class Measured(msgspec.Struct, frozen=True):
    """One run in one precision; errors are squared and divided by the variance of the values.

    Attributes:
        precision: of the step, and the runtime that the file is made for.
        errors: after each of :data:`export.papers.looped.train.MEASURED_LOOPS`, with its 95 % interval.
        settled_error, loops: error and mean loops at the tolerance, within the budget of a request.
        never: share of prompts that do not reach the tolerance within that budget.
        floor: median residual after the last loop; at least half of the prompts do not reach a smaller tolerance.
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
    """Measure runs of one task and width, the full model first.

    Raises:
        UsageError: two runs have one name, or a run is of another function class, length or width.
    """
    models = _open(runs)
    runners, alone = {}, set()
    for run, (model, function) in models.items():
        plain = step_onnx(model)
        for step in (*usual_steps(plain), *int8_steps(plain, model, function)):
            key = run, f"{step.precision} for {step.runtime}"
            runners[key] = OnnxRuntimeRunner(step.data, subject=" in ".join(key))
            if not step.rows_at_once:
                alone.add(key)
    first, _ = next(iter(models.values()))
    times = {rows: _times(runners, step_feeds(first.config, rows), calls) for rows, calls in BATCHES.items()}
    measured = tuple(
        _measured(
            *(run, precision),
            *models[run],
            runner,
            {rows: of[run, precision] for rows, of in times.items()},
            rows=1 if (run, precision) in alone else PROMPTS,
        )
        for (run, precision), runner in runners.items()
    )
    return Record(PROMPTS, TOLERANCE, MAX_LOOPS, processor(), onnxruntime.__version__, measured)


def _open(runs: Iterable[Path]) -> dict[str, tuple[PromptTransformer, str]]:
    """Return the model and the function class of each run, by name."""
    models: dict[str, tuple[PromptTransformer, str]] = {}
    wanted = ""
    for run in runs:
        model, config, _ = load(run, {MODEL: create})
        name, function, size = run.resolve().name, config.arguments["function"], model.config
        if size.injection is None:
            fix = "Leave it out."
            raise UsageError(f"RUN {run}", given=Raw("an unlooped model"), expected="a looped one", fix=fix)
        found = f"{function}, d = {size.dims}, {size.points} points, D = {size.dim}"
        wanted = wanted or found
        if name in models or found != wanted:
            given = Raw(found if found != wanted else f"a second run of the name {name}")
            fix = "Leave it out, or rename it."
            raise UsageError(f"RUN {run}", given=given, expected=f"runs of {wanted} with different names", fix=fix)
        models[name] = model, function
    return models


def _measured(
    run: str,
    precision: str,
    model: PromptTransformer,
    function: str,
    runner: OnnxRuntimeRunner,
    times: Mapping[int, tuple[float, float]],
    rows: int,
) -> Measured:
    """Measure the errors with so many prompts at once, as the server would."""
    config, shape = model.config, model.config.shapes[0]
    xs, ys = draw_prompts(function, PROMPTS, config.points, config.dims, generator_of(EVALUATION))
    path = _path(runner, model, xs, ys, rows)

    squared = partial(squared_errors, function, config.dims, values=ys[:, -1].numpy())
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


def _path(
    runner: OnnxRuntimeRunner, model: PromptTransformer, xs: torch.Tensor, ys: torch.Tensor, rows: int
) -> Trajectory:
    with torch.no_grad():
        prompts, states = (tensor.numpy() for tensor in Embed(model)(xs, ys[:, :-1]))
    found = np.empty((2, max(MEASURED_LOOPS), len(xs)), np.float32)  # predictions and residuals
    for begin in range(0, len(xs), rows):
        prompt, state = (array[begin : begin + rows] for array in (prompts, states))
        last = np.full((len(prompt), 1), prompt.shape[1] - 1, np.int64)
        for loop in range(max(MEASURED_LOOPS)):
            outputs = runner.infer(dict(zip(STEP_INPUTS, (state, prompt, last), strict=True)))
            state = outputs["next_state"]
            for place, name in enumerate(("prediction", "residual")):
                found[place, loop, begin : begin + rows] = outputs[name][:, 0]
    return Trajectory(*found)


def _times(
    runners: Mapping[tuple[str, str], OnnxRuntimeRunner], feeds: dict[str, Array], calls: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the milliseconds of a step, and how many times as fast as the first runner it is."""
    seconds = times_in_turns(runners, feeds, calls)
    full = next(iter(seconds.values()))
    return {key: (float(1e3 * np.median(one)), float(np.median(full / one))) for key, one in seconds.items()}


def show(record: Record) -> None:
    """Print the table of a record."""
    first, at = record.measured[0], f"at {record.tolerance:g}"
    columns = ("run", "layers", "parameters", "precision", *(f"{loops} loops" for loops in first.errors))
    columns += (
        f"error {at}",
        f"mean loops {at}",
        f"share that misses {record.tolerance:g}",
        "median residual at the end",
    )
    columns += tuple(f"speed, {rows} rows" for rows in first.ratios)
    rows = [
        (
            *(one.run, one.layers, one.parameters, one.precision),
            *(f"{error:.4f}" for error, _, _ in one.errors.values()),
            *(f"{one.settled_error:.4f}", f"{one.loops:.1f}", f"{one.never:.0%}", f"{one.floor:.1g}"),
            *(f"{ratio:.2f}" for ratio in one.ratios.values()),
        )
        for one in record.measured
    ]
    where = f"{record.processor.name}, ONNX Runtime {record.onnxruntime}, one thread"
    title = f"Squared error / normaliser, {record.prompts} prompts, and speed relative to {first.run} in FP32 ({where})"
    print_table(title, columns, rows)


def _read(path: Path) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError) as error:
        fix = "Give a file that --out wrote."
        given = Raw(str(error))
        raise UsageError(f"--table {path}", given=given, expected="a record of precisions", fix=fix) from None


def main() -> None:
    """Measure runs, or print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="runs of one function class, the full model first")
    parser.add_argument("--out", type=Path, help="the record to write")
    parser.add_argument("--table", type=Path, help="print this record instead")
    options = parser.parse_args()
    if bool(options.runs) == bool(options.table) or (options.table and options.out):
        parser.error("give runs and perhaps --out, or --table alone")
    torch.set_num_threads(1)
    try:
        record = _read(options.table) if options.table else measure(options.runs)
    except FewheadsError as error:
        parser.error(str(error))
    if options.out:
        write_whole(options.out, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    show(record)


if __name__ == "__main__":
    main()
