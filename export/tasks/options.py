"""Options of a fine-tuning, whose defaults are those of :class:`export.finetune.recipe.Recipe`, but for some epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from edge.cli.options import grouped_options
from edge.errors import UsageError
from export.finetune.recipe import Distillation, Recipe

F = TypeVar("F", bound=Callable[..., Any])

_RECIPE, _DISTILLATION = Recipe(), Distillation()


def epochs_option(default: int = _RECIPE.epochs) -> Callable[[F], F]:
    """Return ``--epochs``, with another default for a command that has a reason."""
    text = "All run; the best one is kept."
    return click.option("--epochs", type=click.IntRange(1), default=default, show_default=True, help=text)


batch_option = click.option(
    "--batch", type=click.IntRange(1), default=_RECIPE.batch_size, show_default=True, help="Examples per step."
)
rate_option = click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    default=_RECIPE.peak_learning_rate,
    show_default=True,
    help="Peak learning rate.",
)


def _given(**weights: float | None) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if weight is not None}


#: Adds the weights of a distillation to a command, which gets the given ones, by name, as ``distillation``.
distillation_options = grouped_options(
    _given,
    "distillation",
    (
        click.option(
            "--imitation",
            type=click.FloatRange(0, 1),
            show_default=str(_DISTILLATION.imitation),
            help="With --teacher: weight of the teacher's outputs; the task's own loss has the rest of 1.",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(0, min_open=True),
            show_default=str(_DISTILLATION.temperature),
            help="With --teacher: divides the logits of both models before they are compared.",
        ),
        click.option(
            "--hidden",
            type=click.FloatRange(0),
            show_default=str(_DISTILLATION.hidden),
            help="With --teacher: weight of its hidden states, beside the rest of the loss. Each layer follows that of "
            "the teacher at the nearest depth. The widths must be equal; 0 leaves the states out.",
        ),
    ),
)


def distillation_of(weights: Mapping[str, float], teacher: Path | None) -> Distillation:
    """Return the settings of a distillation; raise a UsageError for weights without a teacher."""
    if weights and teacher is None:
        option, weight = next(iter(weights.items()))
        fix = f"Give --teacher, or leave --{option} out."
        raise UsageError(f"--{option}", given=weight, expected="a run as --teacher beside it", fix=fix)
    return Distillation(**weights)
