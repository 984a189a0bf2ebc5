"""Options and progress bars that ``fewheads reduce`` and ``fewheads plan`` share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import click

from edge.cli.options import FloatRange, given_options, grouped_options
from edge.cli.output import progress
from edge.errors import UsageError
from export.estimate.devices import BoardMode
from export.reduce.target import CALIBRATION_EXAMPLES, LEARNING_RATE, PASSES, TIMED_TOKENS, Strategy, Target
from export.training.options import imported_data_option, run_data_dir_option
from export.training.points import PointTimes
from export.training.watch import Watch

if TYPE_CHECKING:
    from export.reduce.losses import OnProgress


class PlanOptions(NamedTuple):
    """What a plan is made for, and the data that it is made with, as the options have them."""

    target_speedups: tuple[float, ...]
    tokens: str
    batches: str
    precision: str | None
    examples: int
    data_dir: Path | None
    data: Path | None
    strategy: Strategy | None = None

    def checked_precision(self, targets: Sequence[Target]) -> str:
        """Return the precision of predictions.

        Raises:
            UsageError: one is given, but nothing is predicted.
        """
        if self.precision and not any(isinstance(target, BoardMode) for target in targets):
            expected = "nothing without --for a Jetson, because measured times have the precision of their runtime"
            raise UsageError("--precision", given=self.precision, expected=expected, fix="Leave it out, or give --for.")
        return self.precision or "fp16"


class _Speedups(click.ParamType[tuple[float, ...]]):
    """Factors above 1, with commas between them, as an ascending tuple."""

    name = "factor"

    def convert(
        self, value: str | tuple[float, ...], param: click.Parameter | None, context: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        factors = set[float]()
        with suppress(ValueError):
            factors = {float(text) for text in value.split(",")}
        named = {f"{factor:g}" for factor in factors}
        if not named or len(named) < len(factors) or not all(1 < factor < math.inf for factor in factors):
            expected, fix = (
                "different factors above 1",
                "Give one, such as 2, or to `fewheads reduce` several, such as 1.5,2,3.",
            )
            raise UsageError("--target-speedup", given=value, expected=expected, fix=fix)
        return tuple(sorted(factors))


#: Adds the options of a plan to a command, which gets all of them as the argument ``options``.
plan_options = grouped_options(
    PlanOptions,
    "options",
    (
        click.option(
            "--target-speedup",
            "target_speedups",
            type=_Speedups(),
            default="2",
            show_default=True,
            help="For the whole model: of the mean time over --tokens and --batch, on the device that is planned for. "
            "`reduce` takes several, such as 1.5,2,3.",
        ),
        click.option(
            "--tokens",
            default=str(TIMED_TOKENS),
            show_default=True,
            help="Lengths of the inputs, such as 32,128, or with weights 32:3,128:1; images have a fixed one.",
        ),
        click.option(
            "--batch",
            "batches",
            default="1",
            show_default=True,
            help="Inputs of a run, such as 1,8, or with weights 1:3,8:1.",
        ),
        click.option(
            "--precision", type=click.Choice(["fp16", "int8"]), help="Of the predictions for a Jetson.  [default: fp16]"
        ),
        click.option(
            "--calibration",
            "examples",
            type=click.IntRange(1),
            default=CALIBRATION_EXAMPLES,
            show_default=True,
            help="Examples to measure with; their tokens must outnumber the features of the widest layer.",
        ),
        run_data_dir_option,
        imported_data_option,
        click.option(
            "--strategy",
            type=click.Choice(get_args(Strategy)),
            help="'search' finds a shape for each layer, so that the outputs change least without training; 'spread' "
            "keeps whole layers, better after training on much text.  [default: search; spread with --distil]",
        ),
    ),
)


class DistilOptions(NamedTuple):
    """How a reduced model is restored, as the options have it; without texts it is not."""

    distil: tuple[Path, ...]
    leave_out: bool
    passes: float
    rate: float

    def checked_texts(self) -> tuple[Path, ...]:
        """Return the files of texts; raise a UsageError if there are none, but an option of a training is given."""
        others = [each for each in given_options() if each.name in ("leave_out", "passes", "rate", "device")]
        if not self.distil and others:
            fix = "Leave it out, or give --distil."
            raise UsageError(others[0].opts[0], expected="--distil with texts beside it", fix=fix)
        return self.distil


distil_options = grouped_options(
    DistilOptions,
    "distilling",
    (
        click.option(
            "--distil",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="TEXTS",
            help="Restore what was cut: train on these texts, without labels, to answer as the original. A file, plain "
            "or .xz, with a text in each line, or two with a tab between them for pairs; repeatable.",
        ),
        click.option(
            "--leave-out-evaluated",
            "leave_out",
            is_flag=True,
            help="Leave out texts of --distil with a sentence of the evaluation sets below --data-dir, or of the run's "
            "hold-out or dev, which else are refused.",
        ),
        click.option(
            "--passes",
            type=FloatRange(0, min_open=True),
            default=PASSES,
            show_default=True,
            help="Over the texts of --distil; a part of one is allowed.",
        ),
        click.option(
            "--lr",
            "rate",
            type=FloatRange(0, min_open=True),
            default=LEARNING_RATE,
            show_default=True,
            help="Peak learning rate of --distil.",
        ),
    ),
)


@contextmanager
def reduction_progress(training: str | None = None) -> Iterator[tuple[OnProgress, Watch]]:
    """Show a bar for each stage of a reduction, and of a training of this name; yield what moves them.

    A stage that begins ends those before it, some of which have nothing to do.
    """
    with progress() as bar:
        names = {"texts": "reading texts"} if training else {}
        names |= {"data": "preparing the data", "times": "times of the options"}
        names |= {"losses": "trying each option", "layers": "reducing layers"}
        tasks = {stage: bar.add_task(name, total=None, note="") for stage, name in names.items()}
        watch = Watch(training or "", bar, bar.add_task(training or "", total=None, note="", visible=bool(training)))

        def move(stage: str, done: int, total: int) -> None:
            for task in bar.tasks[: list(tasks).index(stage)]:
                if not task.finished:
                    bar.update(task.id, completed=1, total=1)
            bar.update(tasks[stage], completed=done, total=total)

        yield move, watch


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
