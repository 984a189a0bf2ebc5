"""Options of the commands on language models, and the table of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from edge.bundles.manifest import Measure
from export.generate.formats import Source
from export.training.options import precision_option, seed_option

#: Peak learning rates of adapters and of all weights, unless options say otherwise.
RATE, FULL_RATE = 1e-3, 1e-4

#: Metrics in the table of an evaluation, beside the exact match.
_SHOWN = ("cross_entropy", "perplexity", "rmse", "unparsable", "token_precision", "token_recall", "token_f1")

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
tuning_precision_option = precision_option(
    default="fp32", help="Precision of the multiplications in training; scores are in fp32."
)


def files_of(sources: Sequence[Source]) -> dict[str, Path]:
    """Return the files and directories of data, by the option that names each; a calculator has none."""
    return {f"--data {source}": Path(source.path) for source in sources if source.format != "calculator"}


def rows_by_file(measures: Sequence[Measure]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return the columns and rows of the table of an evaluation: a row for each file."""
    by_name = {(measure.split, measure.metric): measure for measure in measures}
    rows: list[tuple[object, ...]] = []
    for split in dict.fromkeys(measure.split for measure in measures):
        right = by_name[split, "exact_match"]
        low, high = right.interval or (right.value, right.value)
        others = [by_name[split, metric].value if (split, metric) in by_name else None for metric in _SHOWN]
        rows.append((split, right.n, right.value, f"{low:.3f} … {high:.3f}", *others))
    columns = ("data", "items", "exact match", "95 % interval", *(name.replace("_", " ") for name in _SHOWN))
    return columns, rows
