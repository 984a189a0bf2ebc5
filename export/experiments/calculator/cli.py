"""The commands ``fewheads calculator``."""

from __future__ import annotations

import click

from export.experiments.calculator.search.cli import search
from export.experiments.calculator.variations.cli import benchmark_loss, vary


@click.group()
def calculator() -> None:
    """Compare the calculators, vary their training, and look at what they do."""


calculator.add_command(search)
calculator.add_command(vary)
calculator.add_command(benchmark_loss)
