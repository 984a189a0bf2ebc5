"""Families of smaller encoders, restored on plain text: the tables of FAMILIES.md and of the README's first screen.

``families/MODEL/`` has the records of ``fewheads evaluate`` of the original and its tiers, and of ``fewheads estimate``
of their bundle. ``python -m export.papers.frontier.families`` writes the tables anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from export.report.embeddings.records import COSINE, RunRecord, Score, read_records, tables
from export.report.table import Table, with_tables, write_pages

_HERE = Path(__file__).parent
PAGE, README = _HERE / "FAMILIES.md", _HERE.parents[2] / "README.md"
_COMMAND = "python -m export.papers.frontier.families"
_RECORDS = "export/papers/frontier/families"
#: Power modes of the estimates.
_MODES = ("15W", "MAXN_SUPER")
_MEAN, _SICK, _QUESTIONS = "mean of STS13, STS14, STS15, STS-B dev", "SICK test", "QNLI dev"


def pages() -> dict[Path, str]:
    """Return FAMILIES.md and README.md with the tables of the records."""
    page, summary = PAGE.read_text(), list[Sequence[object]]()
    for directory in sorted(path for path in (_HERE / "families").iterdir() if path.is_dir()):
        records = read_records(directory)
        found = {
            "speed": _speed(records, directory),
            **{table.title.partition(" ")[0]: table for table in tables(records)},
        }
        names = {f"{_RECORDS}/{directory.name}#{name.lower()}": table for name, table in found.items()}
        page = with_tables(page, _COMMAND, names)
        summary += _summary(records)
    heads = (
        "model",
        "on a Jetson, FP16, predicted",
        "similarity",
        "SICK",
        "retrieval in the original's index",
        "cosine",
    )
    return {PAGE: page, README: with_tables(README.read_text(), _COMMAND, {_RECORDS: Table("", heads, summary)})}


def _summary(records: Sequence[RunRecord]) -> Iterator[Sequence[object]]:
    """Yield a row of the README for each run: its score if it is the original, else its differences."""
    for record in records:
        times = (one for one in record.speed.predicted if one.rows == 1)
        is_original = record is records[0]
        faster = "1×" if is_original else ", ".join(f"{one.times_faster:.1f}×" for one in times)
        found = {
            (one.group, one.items, one.measure): one
            for one in record.scores
            if (one.queries, one.index) != ("original", "run")
        }
        mixed = next(
            (
                one
                for one in record.scores
                if one.group == "mixed" and one.items == _QUESTIONS and (one.queries, one.index) == ("run", "original")
            ),
            None,
        )
        shown = (
            found["sts", _MEAN, "Spearman"],
            found["sts", _SICK, "Spearman"],
            found["retrieval", _QUESTIONS, "MRR@10"] if is_original else mixed,
        )
        cosine = next((one.value for one in record.scores if one.measure == COSINE), None)
        yield (record.run, faster, *map(_cell, shown), None if is_original else cosine)


def _cell(score: Score | None) -> object:
    if score is None:
        return None
    return score.difference or f"{score.value.value:.1f}"


def _speed(records: Sequence[RunRecord], directory: Path) -> Table:
    """Return the predicted latencies of all tiers, for both precisions and power modes."""
    estimates = [msgspec.json.decode((directory / f"estimate-{mode}.json").read_bytes()) for mode in _MODES]
    rows: dict[tuple[str, str, int], list[Any]] = {}
    for estimate in estimates:
        for row in estimate["rows"]:
            cells = rows.setdefault((row["tier"].removesuffix("-int8"), row["precision"], row["tokens"]), [])
            band = row["prediction"]
            cells += [
                f"{row['milliseconds']:.2f} ({band['low_ms']:.2f} … {band['high_ms']:.2f})",
                f"{row['times_faster']:.2f}×",
            ]
    heads = ("tier", "precision", "tokens", *(head for mode in _MODES for head in (f"{mode}, ms", "times faster")))
    return Table("", heads, [(*key, *cells) for key, cells in rows.items()], 2)


if __name__ == "__main__":
    write_pages(pages())
