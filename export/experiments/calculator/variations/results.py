"""From parts to results: a row for each variant, and the variant that validation chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from edge.bundles.manifest import Measure
from export.papers.calculator.benchmark import SCORE, SPLIT
from export.papers.calculator.variations.grid import BASE, BENCHMARK, DEV, PRODUCT, SQUARED
from export.papers.calculator.variations.parts import Part
from export.training.intervals import across_seeds
from export.training.provenance import Processor, processor

#: Measures in tables: metric, split, heading.
COLUMNS = (
    ("mae", "val", "MAE val"),
    ("mae", "in_range", "MAE in range"),
    ("mae", "out_of_range", "MAE out of range"),
    ("mae", "long/4-8", "MAE 4 to 8 terms"),
    (SCORE, SPLIT, "score"),
    ("exact_match", "in_range", "right in range"),
    ("exact_match", "out_of_range", "right out of range"),
    ("exact_match", "long", "right long"),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A variant.

    Attributes:
        diverged: runs whose loss grew beyond all numbers; a variant with one has no measures.
        measures: means over the seeds with Student's intervals, or those of the one run.
    """

    factor: str
    setting: str
    parameters: int | None
    seeds: int
    diverged: int
    epochs: float | None
    seconds: float | None
    measures: tuple[Measure, ...]

    def measure(self, metric: str, split: str) -> Measure:
        """Return a measure."""
        return next(one for one in self.measures if (one.metric, one.split) == (metric, split))

    @property
    def validation(self) -> float:
        """Mean absolute error on validation, by which variants are chosen."""
        return self.measure("mae", "val").value


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All results.

    Attributes:
        chosen: of each factor, the setting with the least error on validation, that of the base included. Losses on dev
            data are not chosen by it, because it has nothing out of range and nothing long.
        cells: of the product, each with the learning rate that validation chooses.
    """

    rows: tuple[Row, ...]
    chosen: dict[str, str]
    cells: tuple[Row, ...]
    verdict: str
    processor: Processor


def results_of(parts: Sequence[Part]) -> Results:
    """Return the results of parts."""
    by_variant: dict[str, list[Part]] = {}
    for part in parts:
        by_variant.setdefault(part.variant.name, []).append(part)
    rows = [_row(same) for same in by_variant.values()]
    chosen = _chosen(rows)
    return Results(
        rows=tuple(rows),
        chosen={factor: row.setting for factor, row in chosen.items()},
        cells=tuple(_cells(rows)),
        verdict=_verdict(rows, chosen),
        processor=processor(),
    )


def _row(parts: Sequence[Part]) -> Row:
    found = [part.metrics for part in parts if part.metrics is not None]
    whole = len(found) == len(parts)
    of_runs = [one.measures for one in found]
    measures = across_seeds(of_runs) if len(found) > 1 else of_runs[0] if found else ()
    return Row(
        factor=parts[0].variant.factor,
        setting=parts[0].variant.setting,
        parameters=found[0].parameters if found else None,
        seeds=len(parts),
        diverged=len(parts) - len(found),
        epochs=sum(one.epochs for one in found) / len(found) if whole else None,
        seconds=sum(one.seconds for one in found) / len(found) if whole else None,
        measures=measures if whole else (),
    )


def _chosen(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the row that validation chooses for each factor; the base, too, is a candidate of each but the product."""
    measured = [row for row in rows if row.measures]
    base = [row for row in measured if row.setting == BASE]
    return {
        factor: min(
            [row for row in measured if row.factor == factor] + (base if factor != PRODUCT else []),
            key=lambda row: row.validation,
        )
        for factor in dict.fromkeys(row.factor for row in measured if row.setting != BASE and row.factor != DEV)
    }


def _cells(rows: Sequence[Row]) -> Iterator[Row]:
    best: dict[str, Row] = {}
    for row in (row for row in rows if row.factor == PRODUCT and row.measures):
        cell = row.setting.rpartition(", ")[0]
        best[cell] = min(best.get(cell, row), row, key=lambda row: row.validation)
    yield from best.values()


def _verdict(rows: Sequence[Row], chosen: Mapping[str, Row]) -> str:
    found = {row.setting: row for row in rows if row.factor != PRODUCT and row.measures}
    if {SQUARED, BENCHMARK} <= found.keys():
        changes = _changes(found[BENCHMARK], found[SQUARED])
        return f"With {BENCHMARK} as the loss, in parentheses with a {SQUARED} on the same items: {changes}."
    if BASE not in found:
        return "Nothing is compared yet."
    sentences = [
        f"For {factor} it chooses {row.setting}" + ("" if row.setting == BASE else f": {_changes(row, found[BASE])}")
        for factor, row in chosen.items()
    ]
    first = "Validation chooses by the mean absolute error; in parentheses is that of the published setting"
    return f"{'. '.join([first, *sentences])}."


def _changes(row: Row, other: Row) -> str:
    return ", ".join(
        f"{heading} {row.measure(metric, split).value:.3g} ({other.measure(metric, split).value:.3g})"
        for metric, split, heading in COLUMNS[:5]
    )
