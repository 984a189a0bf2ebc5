"""Options of the commands on language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from export.generate.formats import Source
from export.training.options import seed_option

#: Peak learning rate of adapters, unless options say otherwise.
RATE = 1e-3

data_option = click.option(
    "--data",
    "data",
    multiple=True,
    required=True,
    metavar="FORMAT:PATH",
    help="gsm8k:FILE, openmath:FILE_OR_DIRECTORY, mathematics:FILE_OR_DIRECTORY, or calculator:SPLIT. Repeatable.",
)
limit_option = click.option("--limit", type=click.IntRange(1), help="Examples of each file, at most.  [default: all]")
language_seed_option = seed_option("Of everything that is drawn.")


def files_of(sources: Sequence[Source]) -> dict[str, Path]:
    """Return the files and directories of data, by the option that names each; a calculator has none."""
    return {f"--data {source}": Path(source.path) for source in sources if source.format != "calculator"}
