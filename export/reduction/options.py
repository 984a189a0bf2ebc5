"""Options and progress bars that ``fewheads reduce`` and ``fewheads plan`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from edge.cli.output import progress

if TYPE_CHECKING:
    from export.reduction.reduce import Progress

#: Times of the shapes of layers, in the state of a reduction and in the directory of a frontier.
LATENCIES = "latency.json"
#: The defaults of --tokens and --calibration.
TIMED_TOKENS, CALIBRATION_EXAMPLES = 32, 256

target_option = click.option(
    "--target-speedup",
    type=click.FloatRange(1, min_open=True),
    default=2.0,
    show_default=True,
    help="For the whole model, at --tokens, on ONNX Runtime with one thread, or by --latency-table.",
)
tokens_option = click.option(
    "--tokens",
    type=click.IntRange(1, 512),
    default=TIMED_TOKENS,
    show_default=True,
    help="Length of the input that is timed; images have a fixed one.",
)
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
                ("times", "timing each option"),
                ("losses", "trying each option"),
                ("layers", "reducing layers"),
            )
        }

        def on_shape(done: int, shapes: int) -> None:
            bar.update(tasks["times"], completed=done, total=shapes)

        def on_progress(step: Progress) -> None:
            bar.update(tasks[step.stage], completed=step.done, total=step.layers)

        yield on_shape, on_progress
