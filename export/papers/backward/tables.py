"""The tables of RESULTS.md, of the committed records; ``python -m export.papers.backward.tables`` writes them anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edge.bundles.manifest import Measure
from export.generate.model import BaseIdentity
from export.papers.backward import calculators, mismatch, run
from export.papers.backward.methods import FROZEN, HEAD
from export.papers.experiment import REPORT, SETTINGS, Experiment, read_settings, report_on
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import Difference, Mean, bounds_of, with_interval

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "RESULTS.md", HERE / "results"
_COMMAND, _RECORDS = "export.papers.backward.tables", "export/papers/backward/results"
#: Right answers in percent, as paper 000 has them.
_PAPER = {"Gemma 3 270M": (54.2, 9.7, 28.0), "Gemma 3 1B": (93.4, 63.3, 39.6)}
_SPLITS = ("in range", "out of range", "long")
#: Of the methods whose answers are on the page.
_ANSWERED = (FROZEN.name, HEAD.name, "vocabulary bias", "LoRA", "full fine-tuning")
#: What the fewer heads and neurons are named in the records, and in the table.
_KEPT = {
    "-neurons-0.5": (1, 0.5, "half of the neurons"),
    "-0.75": (0.75, 0.75, "3/4 of heads and neurons"),
    "": (0.75, 1, "3/4 of the heads"),
    "-0.5": (0.5, 0.5, "half of heads and neurons"),
}


def _places(name: str) -> list[Path]:
    """Return the directories of experiments below one of the results, one for each model."""
    return sorted(path.parent for path in (RESULTS / name).glob(f"*/{SETTINGS}"))


def pages() -> dict[Path, str]:
    """Return RESULTS.md and all reports, with their tables made from the records."""
    comparison = run.HeadComparison(read_settings(RESULTS / "compare", run.ComparisonSettings), RESULTS / "compare")
    mismatches = {
        place: mismatch.Mismatch(read_settings(place, mismatch.MismatchSettings), place)
        for place in _places("mismatch")
    }
    finetuned = {
        place: calculators.FinetunedCalculators(read_settings(place, calculators.CalculatorSettings), place)
        for place in _places("models")
    }
    every: dict[Path, Experiment[Any]] = {RESULTS / "compare": comparison, **mismatches, **finetuned}
    reports = {place: report_on(one, place, plots=False) for place, one in every.items()}
    losses, answers, *_ = reports[RESULTS / "compare"].tables
    switched, conditions, scored = [], [], []
    for place, one in mismatches.items():
        switches, all_conditions = reports[place].tables
        switched += [(_named(one.settings.base), *row) for row in switches.rows]
        conditions += [(_named(one.settings.base), *row) for row in all_conditions.rows]
    for place, other in finetuned.items():
        scored += [(_named(other.settings.base), *row) for row in reports[place].tables[0].rows]
    tables = {
        "compare": losses,
        f"compare/records.jsonl.xz, {_RECORDS}/compare/beam.json": _answers(answers),
        f"mismatch, {_RECORDS}/models": _calculators(conditions, scored),
        "mismatch": switches._replace(heads=("model", *switches.heads), rows=switched, texts=3),
        "reduce": _reduced(),
    }
    by_record = {f"{_RECORDS}/{name}": table for name, table in tables.items()}
    written = {place / REPORT: report.page for place, report in reports.items()}
    return {PAGE: with_tables(PAGE.read_text(), f"python -m {_COMMAND}", by_record), **written}


def _named(base: BaseIdentity) -> str:
    origin, _, _ = base.dequantized_from.partition(", SHA-256")
    return f"{base.name}, dequantized from {origin}" if origin else base.name


def _answers(answers: Table) -> Table:
    """Return right answers beside those of a beam search, which an earlier version of the command measured, too."""
    beam = msgspec.json.decode((RESULTS / "compare" / "beam.json").read_bytes())
    cells: dict[str, list[object]] = {}
    for key, kind in (("exact_match", Mean), ("head_exact_match", Difference)):
        scaled = [(row[key]["value"], *row[key]["interval"]) for row in beam["rows"]]
        cells[key] = [kind(100 * value, (100 * low, 100 * high)) for value, low, high in scaled]
    rows: list[Sequence[object]] = []
    for row in answers.rows:
        _, minus, name = str(row[0]).rpartition("the head minus: ")
        if name in _ANSWERED:
            rows.append(row)
        if name == FROZEN.name:
            key = "head_exact_match" if minus else "exact_match"
            rows.append((minus + beam["method"], None if minus else 0, *cells[key]))
    return answers._replace(rows=rows)


def _calculators(conditions: Sequence[Sequence[object]], scored: Sequence[Sequence[Any]]) -> Table:
    rows: list[tuple[object, ...]] = [(f"{name}, QLoRA (paper 000)", 1, *of) for name, of in _PAPER.items()]
    for model, trained, _, seeds, _, *shares in scored:
        rows.append(
            (f"{model}, {trained}", seeds, *(with_interval(of.value, of.interval, "{:.1f}".format) for of in shares))
        )
    measured = {measure.split: _percent(measure) for measure in _exact("models/calculator-char-test.json")}
    of_splits = [measured[f"calculator/{split.replace(' ', '_')}"] for split in _SPLITS]
    rows.append(("calculator-char, trained on 1,717 of the 1,907 expressions alone", 1, *of_splits))
    for name, base, used in (
        ("math-small, LoRA of rank 32", "FP32", "FP32, its own"),
        ("math-small rounded to NF4, LoRA of rank 32, merged into FP32", "NF4", "FP32, merged"),
    ):
        key = ("math-small", base, used, "once")
        answers = [row[-1] for row in conditions if row[:4] == key and row[4] != mismatch.TRAINED]
        rows.append((name, 3, *answers))
    return Table("Calculators", ("model", "seeds", *_SPLITS), rows)


def _reduced() -> Table:
    mathematics = msgspec.json.decode((RESULTS / "reduce" / "mathematics.json").read_bytes())["results"]
    by_method = {(of["method"], of.get("heads", 1), of.get("neurons", 1)): of for of in mathematics}
    rows: list[tuple[object, ...]] = [
        ("all", _of_calculator("dense"), None, _of_mathematics(by_method["dense", 1, 1]), None)
    ]
    for end, (heads, neurons, words) in _KEPT.items():
        methods = ("calibrated", "magnitude")
        of_calculator = [_of_calculator(f"{method}{end}") if end else "not measured" for method in methods]
        of_mathematics = [_of_mathematics(by_method[method, heads, neurons]) for method in methods]
        rows.append((words, *of_calculator, *of_mathematics))
    columns = ("kept", "calculator, calibrated", "magnitude", "mathematics, calibrated", "magnitude")
    return Table("Fewer heads and neurons", columns, rows)


def _of_calculator(name: str) -> str:
    (measure,) = _exact(f"reduce/evaluate-{name}.json")
    return _percent(measure)


def _of_mathematics(of: dict[str, Any]) -> str:
    return _percent(Measure("exact", "", of["exact"], 1600, interval=tuple(of["exact_interval"])))


def _exact(file: str) -> list[Measure]:
    measures = msgspec.json.decode((RESULTS / file).read_bytes())["measures"]
    return [measure for measure in msgspec.convert(measures, list[Measure]) if measure.metric == "exact_match"]


def _percent(measure: Measure) -> str:
    return f"{100 * measure.value:.1f} ({bounds_of(measure.interval, lambda share: f'{100 * share:.1f}')})"


if __name__ == "__main__":
    write_pages(pages())
