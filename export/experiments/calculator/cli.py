"""The commands ``fewheads calculator``."""

from __future__ import annotations

import click

from export.experiments.calculator.baseline import baseline


@click.group()
def calculator() -> None:
    """Compare the calculators, vary their training, and look at what they do."""


calculator.add_command(baseline)
