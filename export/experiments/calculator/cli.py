"""The group ``fewheads calculator`` with all its commands."""

from __future__ import annotations

import click

from export.papers.calculator.baseline import baseline
from export.papers.calculator.comparison.cli import compare
from export.papers.calculator.lengths import lengths
from export.papers.calculator.search.cli import search
from export.papers.calculator.variations.cli import benchmark_loss, vary
from export.papers.calculator.view.cli import view


@click.group()
def calculator() -> None:
    """Compare the calculators, vary their training, and look at what they do."""


for command in (baseline, compare, lengths, search, vary, benchmark_loss, view):
    calculator.add_command(command)
