"""The commands ``fewheads calculator``."""

from __future__ import annotations

import click

from export.experiments.calculator.view.cli import view
from export.experiments.calculator.baseline import baseline
from export.experiments.calculator.comparison.cli import compare


@click.group()
def calculator() -> None:
    """Compare the calculators, vary their training, and look at what they do."""


calculator.add_command(view)
calculator.add_command(baseline)
calculator.add_command(compare)
