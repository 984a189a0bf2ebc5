"""Options of looped models for ``fewheads train``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import click
import msgspec

from edge.cli.options import grouped_options
from edge.errors import UsageError
from export.papers.looped import NAMES
from export.training.options import precision_option
from export.training.recipe import Precision


class LoopedOptions(msgspec.Struct, frozen=True):
    """Shape and length of a training, where they differ from its size's; see the help of the options.

    ``stages`` is the number of stages to train, the first ones; None is all of them.
    """

    size: Literal["small", "paper"] = "small"
    injection: Literal["add", "multiply", "gated", "none"] | None = None
    unlooped: bool = False
    layers: int | None = None
    dim: int | None = None
    dims: int | None = None
    rate: float = 1.0
    steps: int | None = None
    stages: int | None = None
    precision: Precision = "fp32"

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
            type=click.Choice(["add", "multiply", "gated", "none"]),
            help="Looped models: how each loop takes the prompt in.  [default: add]",
        ),
        click.option("--unlooped", is_flag=True, help="Looped models: train twelve layers that run once instead."),
        click.option("--layers", type=click.IntRange(1, 48), help="Looped models: layers.  [default: 1; unlooped 12]"),
        click.option(
            "--dim", type=click.IntRange(8, 4096), help="Looped models: width of a token.  [default: 64; paper 256]"
        ),
        click.option(
            "--dims", type=click.IntRange(2, 100), help="Looped models: dimensions of a point.  [default: 5; paper 20]"
        ),
        click.option(
            "--rate",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="Looped models: learning rates, in units of the size's.",
        ),
        click.option(
            "--steps",
            type=click.IntRange(1),
            help="Looped models: steps of the first stage; the rest keeps its proportion.",
        ),
        click.option("--stages", type=click.IntRange(1), help="Looped models: first stages to train.  [default: all]"),
        # Not auto, so that a seed gives the same model on every machine.
        precision_option(default="fp32", help="Looped models: precision of the multiplications, as for finetune."),
    ),
)
