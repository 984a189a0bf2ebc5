"""Smaller and quantised loops side by side: errors, loops until they settle, and times of a step.

``python -m export.looped.compare RUN... --out FILE`` measures, the full model first; ``--table FILE`` prints a record.
Every run is measured in FP32, in FP16, and in INT8 with scales that are computed at run time (dynamic) or fixed
(static), always by ONNX Runtime on the CPU, which rounds as the files say; TensorRT would sum differently.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
from export.looped.model import PromptConfig, PromptTransformer
from export.looped.seeds import EVALUATION, generator_of
from export.looped.solvers import Trajectory, anderson, stopped
from export.looped.tier import MAX_LOOPS, TOLERANCE, calibration
from export.looped.train import MEASURED_LOOPS, PROMPTS, create
from export.precision import dynamic_int8, fused, half, static_int8
from export.processor import Processor, processor

FULL = "fp32"
BATCHES = {1: 300, 8: 300, 64: 100}  # rows: calls


class Errors(msgspec.Struct, frozen=True):
    """Normalised squared errors of one run in one precision.

    Attributes:
        fixed: after each of :data:`export.looped.train.MEASURED_LOOPS`, with its 95 % interval.
        stopped, loops: error and mean loops at the tolerance, within the budget of a request.
        never: share of prompts that do not reach the tolerance within that budget.
        floor: median residual after the last loop, below which no tolerance is reached.
    """

    fixed: dict[int, tuple[float, float, float]]
    stopped: float
    loops: float
    never: float
    floor: float


class Compared(msgspec.Struct, frozen=True):
    """One run: its layers, its parameters, errors by precision, and times by rows and precision.

    Attributes:
        accelerated: error and mean loops at the tolerance with Anderson acceleration, FP32.
        milliseconds: median time of a step on one thread; all runs and precisions take turns.
        ratios: median of the ratios of neighbouring calls, those of the first run in FP32 over these.
    """

    run: str
    layers: str
    parameters: int
    errors: dict[str, Errors]
    accelerated: tuple[float, float]
    milliseconds: dict[int, dict[str, float]]
    ratios: dict[int, dict[str, float]]


class Record(msgspec.Struct, frozen=True):
    """A comparison, and what it was measured with."""

    command: str
    prompts: int
    tolerance: float
    budget: int
    processor: Processor
    onnxruntime: str
    runs: tuple[Compared, ...]


def measure(runs: list[Path]) -> Record:
    """Measure runs of one function class and size; the first is the full model."""
    loaded = [load(run, {MODEL: create}) for run in runs]
    function = loaded[0][1].arguments["function"]
    models = {run.name: model for run, (model, _, _) in zip(runs, loaded, strict=True)}
    graphs = {name: precisions(model, function) for name, model in models.items()}
    runners = {
        (name, precision): OnnxRuntimeRunner(data, subject=f"{name} in {precision}")
        for name, of_run in graphs.items()
        for precision, data in of_run.items()
    }
    errors = {
        key: _errors(runner, models[key[0]], function, f"{key[0]} in {key[1]}") for key, runner in runners.items()
    }
    times = {rows: _times(runners, loaded[0][0].config, rows, calls) for rows, calls in BATCHES.items()}
    compared = []
    for name, model in models.items():
        shape = model.config.shapes[0]
        compared.append(
            Compared(
                name,
                f"{shape.num_heads} heads of {shape.head_dim}, {shape.ffn_dim} units",
                model.parameter_count,
                {precision: errors[name, precision] for precision in graphs[name]},
                _accelerated(model, function),
                {rows: {p: times[rows][name, p][0] for p in graphs[name]} for rows in BATCHES},
                {rows: {p: times[rows][name, p][1] for p in graphs[name]} for rows in BATCHES},
            )
        )
    command = f"python -m export.looped.compare {' '.join(models)}"
    return Record(command, PROMPTS, TOLERANCE, MAX_LOOPS, processor(), onnxruntime.__version__, tuple(compared))


def precisions(model: PromptTransformer, function: str) -> dict[str, bytes]:
    """Return the step graph in each precision."""
    plain = step_onnx(model)
    return {
        FULL: fused(plain),
        "fp16": half(plain, fp32_head=True),
        "int8 dynamic": dynamic_int8(plain),
        "int8 static": static_int8(plain, calibration(model, function), fp32_head=True),
    }


def _prompts(function: str, config: PromptConfig) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_prompts(function, PROMPTS, config.points, config.dims, generator_of(EVALUATION))


def _errors(runner: OnnxRuntimeRunner, model: PromptTransformer, function: str, what: str) -> Errors:
    xs, ys = _prompts(function, model.config)
    with torch.no_grad():
        prompt, state = (tensor.numpy() for tensor in Embed(model)(xs, ys[:, :-1]))
    last = np.full((len(xs), 1), prompt.shape[1] - 1, np.int64)
    predictions, residuals = [], []
    for _ in range(max(MEASURED_LOOPS)):
        outputs = runner.infer(dict(zip(STEP_INPUTS, (state, prompt, last), strict=True)))
        state = outputs["next_state"]
        predictions.append(outputs["prediction"][:, 0])
        residuals.append(outputs["residual"][:, 0])
    path = Trajectory(np.stack(predictions), np.stack(residuals))
    squared = _squared(path.predictions, ys[:, -1].numpy(), function, model.config)
    fixed = {loops: (float(squared[loops - 1].mean()), *interval(mean, squared[loops - 1])) for loops in MEASURED_LOOPS}
    budget = Trajectory(path.predictions[:MAX_LOOPS], path.residuals[:MAX_LOOPS])
    end = stopped(budget, TOLERANCE)
    return Errors(
        fixed,
        float(_squared(end.predictions, ys[:, -1].numpy(), function, model.config).mean()),
        float(end.loops.mean()),
        float((budget.residuals > TOLERANCE).all(axis=0).mean()),
        float(np.median(path.residuals[-1])),
    )


def _accelerated(model: PromptTransformer, function: str) -> tuple[float, float]:
    xs, ys = _prompts(function, model.config)
    end = stopped(anderson(model, xs, ys[:, :-1], MAX_LOOPS), TOLERANCE)
    error = _squared(end.predictions, ys[:, -1].numpy(), function, model.config).mean()
    return float(error), float(end.loops.mean())


def _squared(predictions: Array, ys: Array, function: str, config: PromptConfig) -> Array:
    squared: Array = (predictions - ys) ** 2 / FUNCTION_CLASSES[function].normaliser(config.dims)
    return squared


def _times(
    runners: Mapping[tuple[str, str], OnnxRuntimeRunner], config: PromptConfig, rows: int, calls: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the milliseconds of a step, and how many times as fast as the first runner it is."""
    seconds = times_in_turns(runners, step_feeds(config, rows), calls)
    full = next(iter(seconds.values()))
    return {key: (float(1e3 * np.median(one)), float(np.median(full / one))) for key, one in seconds.items()}


def show(record: Record) -> None:
    """Print the tables of a record."""
    columns = ("run", "layers", "parameters", "precision")
    errors, times = [], []
    for run in record.runs:
        for precision, found in run.errors.items():
            head = (run.run, run.layers, run.parameters, precision)
            fixed = [f"{found.fixed[loops][0]:.4f}" for loops in MEASURED_LOOPS]
            errors.append((*head, *fixed, f"{found.stopped:.4f}", f"{found.loops:.1f}", f"{found.floor:.1g}"))
            times.append((*head, *(f"{run.ratios[rows][precision]:.2f}" for rows in run.ratios)))
    at = f"at {record.tolerance:g}"
    loops = (*(f"{loops} loops" for loops in MEASURED_LOOPS), at, f"loops {at}", "floor")
    print_table(f"Squared error / normaliser, {record.prompts} prompts", (*columns, *loops), errors)
    first = record.runs[0].run
    title = f"Times as fast as {first} in FP32 ({record.processor.name}, ONNX Runtime {record.onnxruntime}, one thread)"
    print_table(title, (*columns, *(f"{rows} rows" for rows in record.runs[0].ratios)), times)


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
