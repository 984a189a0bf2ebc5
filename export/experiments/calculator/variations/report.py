"""The report: the verdict, one row for each setting, and the product of activations and optimisers."""

from __future__ import annotations

from edge.bundles.manifest import Measure
from export.papers.calculator.variations.grid import PRODUCT
from export.papers.calculator.variations.results import COLUMNS, Results, Row
from export.papers.experiment import markdown_table

HEADS = ("factor", "setting", "parameters", "runs", "epochs", *(heading for _, _, heading in COLUMNS))


def report_of(results: Results, command: str, figure: str | None) -> str:
    """Return the report.

    Args:
        command: that wrote it.
        figure: file name beside the report.
    """
    lines = [
        f"# Results of `fewheads calculator {command}`",
        "",
        results.verdict,
        "",
        "Means over runs that differ in their seed, and half the width of Student's 95 % interval over the seeds. "
        "Items: 636 for validation, 1,457 in range, 2,048 out of range, 500 of 4 to 8 terms, each length with the same "
        "weight, 700 long ones in all. The score is the benchmark's: 1 is the baseline, 2 half its errors. "
        f"Computed on {results.processor.name} ({results.processor.described}).",
        "",
        *markdown_table(HEADS, [cells_of(row) for row in results.rows if row.factor != PRODUCT], texts=2),
    ]
    if results.cells:
        lines += [
            "",
            f"## {PRODUCT}, each with the learning rate that validation chooses",
            "",
            *markdown_table(HEADS[1:], [cells_of(row)[1:] for row in results.cells], texts=1),
        ]
    on_dev = {row.setting: [one for one in row.measures if " dev, " in one.split] for row in results.rows}
    measured = next((measures for measures in on_dev.values() if measures), None)
    if measured:
        rows = [(name, *map(_described, measures)) for name, measures in on_dev.items() if measures]
        heads = ("loss", *(f"{one.split} ({one.n} items)" for one in measured))
        lines += ["", "## MAE on the dev splits", "", *markdown_table(heads, rows, texts=1)]
    if figure:
        lines += ["", f"![Errors by setting]({figure})"]
    return "\n".join(lines) + "\n"


def cells_of(row: Row) -> list[str]:
    """Return the cells of a row, under :data:`HEADS`."""
    cells = [row.factor, row.setting, f"{row.parameters:,}" if row.parameters else "", str(row.seeds)]
    if not row.measures:
        return [*cells, "", f"{row.diverged} diverged", *[""] * (len(COLUMNS) - 1)]
    return [*cells, f"{row.epochs:.0f}", *(_described(row.measure(metric, split)) for metric, split, _ in COLUMNS)]


def _described(measure: Measure) -> str:
    scale, unit = (100, " %") if measure.metric == "exact_match" else (1, "")
    value = f"{scale * measure.value:.3g}"
    if measure.interval is None:
        return value + unit
    low, high = measure.interval
    return f"{value} ± {scale * (high - low) / 2:.2g}{unit}"
