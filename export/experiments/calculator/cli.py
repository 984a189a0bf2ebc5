"""The commands ``fewheads calculator``."""

from __future__ import annotations

import click


@click.group()
def calculator() -> None:
    """Compare the calculators, vary their training, and look at what they do."""
