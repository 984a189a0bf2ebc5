"""Options and progress bars that ``fewheads reduce`` and ``fewheads plan`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import click

from edge.cli.output import progress
from edge.errors import UsageError
from export.estimate.devices import BOARD_MODES, BoardMode
from export.options import F
from export.training.points import THIS, PointTimes

if TYPE_CHECKING:
    from export.reduce.losses import Progress

#: Times of the shapes of layers, in the state of a reduction and in the directory of a frontier.
LATENCIES = "latency.json"
#: The defaults of --tokens and --calibration.
TIMED_TOKENS, CALIBRATION_EXAMPLES = 32, 256

#: What a plan is for: this machine, a Jetson in a power mode, or the device of a latency table.
Target: TypeAlias = "Literal['this'] | BoardMode | Path"

target_option = click.option(
    "--target-speedup",
    type=click.FloatRange(1, min_open=True),
    default=2.0,
    show_default=True,
    help="For the whole model: of the mean time over --tokens and --batch, on the device that is planned for.",
)
_tokens_option = click.option(
    "--tokens",
    default=str(TIMED_TOKENS),
    show_default=True,
    help="Lengths of the inputs, such as 32,128, or with weights 32:3,128:1; images have a fixed one.",
)
_batch_option = click.option(
    "--batch", "batches", default="1", show_default=True, help="Inputs of a run, such as 1,8, or with weights 1:3,8:1."
)
_precision_option = click.option(
    "--precision",
    type=click.Choice(["fp16", "int8"]),
    help="Of the predictions for a Jetson.  [default: fp16]",
)


def points_options(command: F) -> F:
    """Add ``--tokens``, ``--batch`` and ``--precision``; :func:`export.training.points.points_of` reads the first two."""
    return _tokens_option(_batch_option(_precision_option(command)))


def parse_target(text: str) -> Target:
    """Return the target of ``--for``; raise a UsageError that lists all."""
    if text == THIS:
        return "this"
    if text in BOARD_MODES:
        return BOARD_MODES[text]
    expected = f"{THIS}, which is measured here, or one of {', '.join(BOARD_MODES)}"
    fix = "Give one of these; for another device, give --latency-table with its table."
    raise UsageError("--for", given=text, expected=expected, fix=fix)


def check_precision(precision: str | None, targets: Sequence[Target]) -> str:
    """Return the precision of predictions.

    Raises:
        UsageError: one is given, but nothing is predicted.
    """
    if precision and not any(isinstance(target, BoardMode) for target in targets):
        expected = "nothing without --for a Jetson, because measured times have the precision of their runtime"
        raise UsageError("--precision", given=precision, expected=expected, fix="Leave it out, or give --for.")
    return precision or "fp16"


calibration_option = click.option(
    "--calibration",
    "examples",
    type=click.IntRange(1),
    default=CALIBRATION_EXAMPLES,
    show_default=True,
    help="Examples to measure with; their tokens must outnumber the features of the widest layer.",
)


@contextmanager
def reduction_progress() -> Iterator[tuple[Callable[[int, int], None], Callable[[Progress], None]]]:
    """Show a bar for each stage of a reduction, and yield two callbacks: for timings, and for losses and layers."""
    with progress() as bar:
        tasks = {
            stage: bar.add_task(name, total=None, note="")
            for stage, name in (
                ("times", "times of the options"),
                ("losses", "trying each option"),
                ("layers", "reducing layers"),
            )
        }

        def on_shape(done: int, shapes: int) -> None:
            bar.update(tasks["times"], completed=done, total=shapes)

        def on_progress(step: Progress) -> None:
            bar.update(tasks[step.stage], completed=step.done, total=step.layers)

        yield on_shape, on_progress


def point_rows(points: Sequence[PointTimes]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return the columns and rows of a table of operating points; those of the band and measured here if there are."""
    predicted = any(point.low_ms is not None for point in points)
    measured = any(point.measured for point in points)
    columns = ("tokens", "batch", "weight", "original ms", "ms", *(("from", "to") if predicted else ()), "times faster")
    rows: list[tuple[object, ...]] = []
    for point in points:
        band = (point.low_ms, point.high_ms) if predicted else ()
        row = (point.tokens, point.batch, point.weight, point.dense_ms, point.milliseconds, *band, point.speedup)
        here = (point.measured.ratio, point.bound) if point.measured else ()
        rows.append((*row, *here))
    return (*columns, *(("measured here", "at most, by multiplications") if measured else ())), rows
