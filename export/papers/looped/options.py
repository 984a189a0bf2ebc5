"""Options of looped models for ``fewheads train`` and ``fewheads reduce``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge.cli.options import given_options, grouped_options
from edge.cli.output import print_table
from edge.errors import Raw, UsageError
from export.papers.looped import NAMES, PREFIX
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import precision_option
from export.training.watch import Watch, watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.models.transformer import LayerShape
    from export.papers.looped.reduce import ReducedLoop
    from export.training.device import DeviceName
    from export.training.runs import RunMetrics

#: Of the training after a reduction.
_STEPS = 2000


class LoopedOptions(msgspec.Struct, frozen=True):
    """Shape and length of a training, where they differ from its size's; see the help of the options.

    ``stages`` is the number of stages to train, the first ones; None is all of them.
    """

    size: str = "small"
    injection: str | None = None
    unlooped: bool = False
    layers: int | None = None
    dim: int | None = None
    steps: int | None = None
    stages: int | None = None
    precision: str = "fp32"

    def check(self, names: Sequence[str]) -> None:
        """Raise a UsageError if an option is given and no model is looped, or if two contradict each other."""
        usual = msgspec.structs.asdict(LoopedOptions())
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value != usual[name]}
        if given and not set(names) & set(NAMES):
            option, value = next(iter(given.items()))
            expected = f"a model of {', '.join(NAMES)}"
            raise UsageError(f"--{option}", given=value, expected=expected, fix=f"Leave --{option} out.")
        if self.unlooped and self.injection:
            fix = "Leave one of them out."
            raise UsageError("--injection", given=self.injection, expected="no --injection with --unlooped", fix=fix)


#: Adds the options of looped models to a command, which gets all of them as the argument ``looped``.
looped_options = grouped_options(
    LoopedOptions,
    "looped",
    (
        click.option(
            "--size",
            type=click.Choice(["small", "paper"]),
            default="small",
            show_default=True,
            help="Looped models: 5 dimensions, minutes on two cores; or paper 003's 20, for a GPU.",
        ),
        click.option(
            "--injection",
            type=click.Choice(["add", "none"]),
            help="Looped models: whether each loop takes the prompt in.  [default: add]",
        ),
        click.option("--unlooped", is_flag=True, help="Looped models: train twelve layers that run once instead."),
        click.option("--layers", type=click.IntRange(1, 48), help="Looped models: layers.  [default: 1; unlooped 12]"),
        click.option(
            "--dim", type=click.IntRange(8, 4096), help="Looped models: width of a token.  [default: 64; paper 256]"
        ),
        click.option(
            "--steps",
            type=click.IntRange(1),
            help="Looped models: steps of the first stage; the rest keeps its proportion.",
        ),
        click.option("--stages", type=click.IntRange(1), help="Looped models: first stages to train.  [default: all]"),
        # Not auto, because the results in RESULTS.md are of trainings in FP32.
        precision_option(default="fp32", help="Looped models: precision of the multiplications, as for finetune."),
    ),
)


def train_looped(
    name: str,
    directory: Path,
    options: LoopedOptions,
    watch: Watch,
    *,
    seed: int,
    device: DeviceName,
    tensorboard: Path | None,
) -> RunMetrics:
    """Train one model of :data:`export.papers.looped.NAMES`; see :func:`export.papers.looped.train.train_run`."""
    from export.papers.looped.recipes import training_plan
    from export.papers.looped.train import train_run

    function = name.removeprefix(PREFIX)
    injection: Any = None if options.unlooped else options.injection or "add"
    size: Any = options.size
    plan = training_plan(
        function, size, injection=injection, layers=options.layers, dim=options.dim, steps=options.steps
    )
    if options.stages and options.stages > len(plan.stages):
        expected = f"at most {len(plan.stages)}, the stages of this plan"
        raise UsageError("--stages", given=options.stages, expected=expected, fix="Leave --stages out for all of them.")
    precision: Any = options.precision
    replace = msgspec.structs.replace
    kept = plan.stages[: options.stages]
    plan = replace(plan, stages=tuple(replace(of, recipe=replace(of.recipe, precision=precision)) for of in kept))
    return train_run(function, plan, directory, seed=seed, device=device, tensorboard=tensorboard, observer=watch)


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
                option, fix = f"--{name.replace('_', '-')}", "Give --target-speedup, which chooses the sizes."
                raise UsageError(option, given=value, expected="a run of a looped model", fix=fix)

    def shape(self, original: LayerShape) -> LayerShape:
        """Return the new shape of a layer.

        Raises:
            UsageError: it is larger than the original, or equal.
        """
        sizes = {"num_heads": self.heads, "head_dim": self.head_dim, "ffn_dim": self.units}
        given = {field: size for field, size in sizes.items() if size is not None}
        for field, option in (("num_heads", "--heads"), ("head_dim", "--head-dim"), ("ffn_dim", "--units")):
            size, most = given.get(field, 0), getattr(original, field)
            if size > most:
                raise UsageError(option, given=size, expected=f"{most} at most", fix="Give a smaller number.")
        shape = msgspec.structs.replace(original, **given)
        if shape == original:
            expected = f"fewer than {original.num_heads} heads of {original.head_dim} and {original.ffn_dim} units"
            subject, same = "--heads, --head-dim and --units", Raw("the run's own sizes")
            raise UsageError(subject, given=same, expected=expected, fix="Give a smaller number for one of them.")
        return msgspec.structs.replace(shape, scale=None)


#: Adds the options of looped models to a command, which gets all of them as the argument ``sizes``.
size_options = grouped_options(
    SizeOptions,
    "sizes",
    (
        click.option("--heads", type=click.IntRange(1), help="Looped models: heads of a layer that stay."),
        click.option("--head-dim", type=click.IntRange(1), help="Looped models: width of a head."),
        click.option("--units", type=click.IntRange(1), help="Looped models: hidden units of a layer that stay."),
        click.option(
            "--steps",
            type=click.IntRange(0),
            help="Looped models: steps of the training that follows, with RUN as the teacher; 0 leaves it out.  "
            f"[default: {_STEPS}]",
        ),
        click.option("--seed", type=click.IntRange(0), help="Looped models: for the prompts of that training."),
    ),
)


def check_others(names: tuple[str, ...]) -> None:
    """Raise a UsageError if one of these options of the running command was given: they are not for looped runs."""
    for parameter in given_options():
        if parameter.name in names:
            given = click.get_current_context().params[parameter.name]
            given = Raw(", ".join(map(str, given))) if isinstance(given, tuple) else given
            fix = "Give --heads, --head-dim or --units."
            raise UsageError(parameter.opts[0], given=given, expected="a run that is not looped", fix=fix)


def shrink_run(run: Path, out: Path, sizes: SizeOptions, device: DeviceName) -> ReducedLoop:
    """Reduce a looped run, with a bar; see ``reduce_looped``."""
    with loading_torch():
        from export.papers.looped.reduce import reduce_looped

    steps = _STEPS if sizes.steps is None else sizes.steps
    with watching(out.name, lines=False) as watch:
        return reduce_looped(run, out, sizes.shape, steps=steps, seed=sizes.seed or 0, device=device, observer=watch)


def print_reduced(reduced: ReducedLoop) -> None:
    """Print the layers, the time of a loop, and the errors before and after the training."""
    rows = []
    for number, layer in enumerate(reduced.layers):
        shape, errors = layer.plan.shape, (layer.measured_attention_error, layer.measured_feed_forward_error)
        rows.append((number, shape.num_heads, shape.head_dim, shape.ffn_dim, *errors))
    step = reduced.step
    title = f"A loop is {step.ratio:.2f} times as fast ({step.dense_milliseconds:.3f} ms to {step.milliseconds:.3f} ms)"
    print_table(title, ("layer", "heads", "width", "units", "attention's error", "feed-forward's error"), rows)
    before = [(measure.split, f"{measure.value:.4g}") for measure in reduced.untrained]
    print_table("Before the training", ("loops", "squared error / normaliser"), before)
    print_measures(Path(reduced.directory).name, reduced.directory, reduced.metrics)
