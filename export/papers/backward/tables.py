"""The tables of RESULTS.md, of the committed records; ``python -m export.papers.backward.tables`` writes them anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edge.bundles.manifest import Measure
from export.generate.model import BaseIdentity
from export.papers.backward import calculators, chunks, mismatch, run
from export.papers.backward.methods import FROZEN, HEAD, RULES
from export.papers.backward.scores import MethodRecord
from export.papers.experiment import REPORT, SETTINGS, Experiment, ExperimentReport, read_settings, report_on
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import bounds_of, with_interval

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "RESULTS.md", HERE / "results"
_COMMAND, _RECORDS = "export.papers.backward.tables", "export/papers/backward/results"
#: Right answers in percent, as paper 000 has them.
_PAPER = {"Gemma 3 270M": (54.2, 9.7, 28.0), "Gemma 3 1B": (93.4, 63.3, 39.6)}
_SPLITS = ("in range", "out of range", "long")
#: Of the methods whose answers are on the page.
_ANSWERED = (FROZEN.name, *(of.name for of in RULES), HEAD.name, "vocabulary bias", "LoRA", "full fine-tuning")
#: Further comparisons, where they have been run: on modules that the base never saw, of forms of the head, and on
#: another base.
_FURTHER = ("unseen", "forms", "smollm2")
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
    memory = chunks.ChunkMemory(read_settings(RESULTS / "chunks", chunks.ChunkSettings))
    every: dict[Path, Experiment[Any]] = {RESULTS / "compare": comparison, **mismatches, **finetuned}
    reports = {place: report_on(one, place, plots=False) for place, one in every.items()}
    reports[RESULTS / "chunks"] = report_on(memory, RESULTS / "chunks")
    compared = reports[RESULTS / "compare"].tables
    titled = {table.title: table for table in compared}
    losses, answers, *_ = compared
    switched, conditions, scored = [], [], []
    for place, one in mismatches.items():
        switches, all_conditions = reports[place].tables
        switched += [(_named(one.settings.base), *row) for row in switches.rows]
        conditions += [(_named(one.settings.base), *row) for row in all_conditions.rows]
    for place, other in finetuned.items():
        scored += [(_named(other.settings.base), *row) for row in reports[place].tables[0].rows]
    tables = {
        "compare": losses,
        "compare#answers": _answered(answers),
        "compare#tokens": _answered(titled["F1 of the most likely tokens, mean over tokens"]),
        f"mismatch, {_RECORDS}/models": _calculators(conditions, scored),
        "mismatch": switches._replace(heads=("model", *switches.heads), rows=switched, texts=3),
        "chunks": reports[RESULTS / "chunks"].tables[0],
        "reduce": _reduced(),
    }
    for name, report in further(RESULTS).items():
        tables |= dict(zip((f"{name}#losses", f"{name}#answers"), metrics_of(report), strict=True))
        reports[RESULTS / name] = report
    by_record = {f"{_RECORDS}/{name}": table for name, table in tables.items()}
    written = {place / REPORT: report.page for place, report in reports.items()}
    page = with_tables(PAGE.read_text(), f"python -m {_COMMAND}", by_record)
    return {PAGE: page, **written}


def _named(base: BaseIdentity) -> str:
    origin, _, _ = base.dequantized_from.partition(", SHA-256")
    return f"{base.name}, dequantized from {origin}" if origin else base.name


def further(results: Path) -> dict[str, ExperimentReport[MethodRecord]]:
    """Return the reports on the further comparisons that were run."""
    found = {}
    for name in _FURTHER:
        if (results / name / SETTINGS).exists():
            settings = read_settings(results / name, run.ComparisonSettings)
            found[name] = report_on(run.HeadComparison(settings, results / name), results / name, plots=False)
    return found


def metrics_of(report: ExperimentReport[MethodRecord]) -> list[Table]:
    """Return cross-entropies and right answers of a comparison: by examples, without differences, if it has fewer."""
    by_examples = [table for table in report.tables if table.heads[0] == "examples"]
    return [
        table._replace(rows=[row for row in table.rows if "minus: " not in str(row[1])]) for table in by_examples
    ] or list(report.tables[:2])


def _answered(table: Table) -> Table:
    """Return the rows of the methods whose answers are on the page."""
    return table._replace(rows=[row for row in table.rows if str(row[0]).split("minus: ")[-1] in _ANSWERED])


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
