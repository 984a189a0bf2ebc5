"""The table of a language model's metrics on files of data."""

from __future__ import annotations

from collections.abc import Sequence

from edge.bundles.manifest import Measure
from edge.cli.output import print_table

#: Metrics beside the exact match.
_SHOWN = ("cross_entropy", "perplexity", "rmse", "unparsable", "token_precision", "token_recall", "token_f1")


def print_files(title: str, measures: Sequence[Measure]) -> None:
    """Print a row for each file."""
    found = {(measure.split, measure.metric): measure for measure in measures}
    rows = []
    for split in dict.fromkeys(measure.split for measure in measures):
        right = found[split, "exact_match"]
        low, high = right.interval or (right.value, right.value)
        others = [found[split, metric].value if (split, metric) in found else None for metric in _SHOWN]
        rows.append((split, right.n, right.value, f"{low:.3f} … {high:.3f}", *others))
    heads = ("data", "items", "exact match", "95 % interval", *(name.replace("_", " ") for name in _SHOWN))
    print_table(title, heads, rows)
