"""Options of looped runs for ``fewheads reduce``, and its table for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.options import given_options, grouped_options
from edge.cli.output import print_table
from edge.errors import UsageError
from export.loading import loading_torch
from export.measures import print_measures
from export.training.watch import watching

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.papers.looped.reduce import Reduced
    from export.training.device import DeviceName


#: Of the training after a reduction.
_DEFAULT_STEPS = 2000


class SizeOptions(msgspec.Struct, frozen=True):
    """Sizes of the layers of a reduced looped model, None for those that stay, and the steps of its training."""

    heads: int | None = None
    head_dim: int | None = None
    units: int | None = None
    steps: int | None = None
    seed: int | None = None

    def check_none(self) -> None:
        """Raise a UsageError if one is given: the run is not looped."""
        for name, value in msgspec.structs.asdict(self).items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                fix = "Give --target-speedup, which chooses the sizes."
                raise UsageError(option, given=value, expected="a run of a looped model", fix=fix)


_OPTIONS = (
    click.option("--heads", type=click.IntRange(1), help="Looped models: heads of a layer that stay."),
    click.option("--head-dim", type=click.IntRange(1), help="Looped models: width of a head."),
    click.option("--units", type=click.IntRange(1), help="Looped models: hidden units of a layer that stay."),
    click.option(
        "--steps",
        type=click.IntRange(0),
        help="Looped models: steps of the training that follows, with RUN as the teacher; 0 leaves it out.  "
        f"[default: {_DEFAULT_STEPS}]",
    ),
    click.option("--seed", type=click.IntRange(0), help="Looped models: for the prompts of that training."),
)


#: Adds the options of looped models to a command, which gets all of them as the argument ``sizes``.
size_options = grouped_options(SizeOptions, "sizes", _OPTIONS)


def check_others(names: tuple[str, ...]) -> None:
    """Raise a UsageError if one of these options of the running command was given: they are not for looped runs."""
    for parameter in given_options():
        if parameter.name in names:
            given = click.get_current_context().params[parameter.name]
            fix = "Give --heads, --head-dim or --units."
            raise UsageError(parameter.opts[0], given=given, expected="a run that is not looped", fix=fix)


def shrink_run(run: Path, out: Path, sizes: SizeOptions, device: DeviceName) -> Reduced:
    """Reduce a looped run, with a bar; see :func:`export.papers.looped.reduce.reduce_looped`."""
    with loading_torch():
        from export.papers.looped.reduce import Smaller, reduce_looped

    with watching(out.name, lines=False) as watch:
        return reduce_looped(
            run,
            out,
            Smaller(sizes.heads, sizes.head_dim, sizes.units),
            steps=_DEFAULT_STEPS if sizes.steps is None else sizes.steps,
            seed=sizes.seed or 0,
            device=device,
            observer=watch,
        )


def print_reduced(reduced: Reduced) -> None:
    """Print the layers, the time of a loop, and the errors before and after the training."""
    rows = [
        (
            number,
            layer.plan.shape.num_heads,
            layer.plan.shape.head_dim,
            layer.plan.shape.ffn_dim,
            layer.measured_attention_error,
            layer.measured_feed_forward_error,
        )
        for number, layer in enumerate(reduced.layers)
    ]
    step = reduced.step
    title = f"A loop is {step.ratio:.2f} times as fast ({step.dense_milliseconds:.3f} ms to {step.milliseconds:.3f} ms)"
    columns = ("layer", "heads", "width", "units", "attention's error", "feed-forward's error")
    print_table(title, columns, rows)
    before = [(measure.split, f"{measure.value:.4g}") for measure in reduced.untrained]
    print_table("Before the training", ("loops", "squared error / normaliser"), before)
    print_measures(Path(reduced.directory).name, reduced.directory, reduced.metrics)
