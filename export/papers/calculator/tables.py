"""Tables of the calculators; ``python -m export.papers.calculator.tables`` writes documents and figures anew."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch

from export.data.expressions import LONG_TERMS
from export.estimate.devices import DEFAULT_BOARD
from export.estimate.parts import predict_file
from export.estimate.predictions import PredictedLatencies, read_latencies
from export.models.convert import to_onnx
from export.papers.calculator.benchmark import PAPER_SCORE, SCORE, SPLIT
from export.papers.calculator.figures import figures_of
from export.papers.calculator.networks import create
from export.papers.calculator.records import (
    FROZEN,
    ModelResult,
    TrainingRecord,
    Trial,
    Variation,
    grouped,
    pooled,
    results_of,
)
from export.papers.calculator.specs import SPECS
from export.papers.experiment import read_records
from export.report.drawing import write_figure
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import over_seeds, percent

HERE = Path(__file__).parent
RESULTS = HERE / "results"
_ERRORS = {"MAE in range": "in_range", "MAE out of range": "out_of_range", "MAE 4 to 8 terms": "long/4-8"}
_RIGHT = {"right in range, %": "in_range", "right out of range, %": "out_of_range", "right long, %": "long"}
_LENGTHS = (*(f"long/{terms}" for terms in LONG_TERMS), "long/without_5", "long/with_5")
_PRODUCT = "activation × optimiser"
_VARIED = {f"mae {split}": head for head, split in {"MAE val": "val", **_ERRORS}.items()} | {"score benchmark": "score"}
_SHARES = {f"exact_match {split}": head for head, split in _RIGHT.items()}


def sums_tables(models: Sequence[ModelResult]) -> list[Table]:
    """Return the tables of calculators of sums."""
    names = [model.name for model in models]
    compared = (FROZEN, "fnn2" if "fnn2" in names else names[0])
    accuracy, right, against, lengths, published = [], [], [], [], []
    for model in models:
        maes = [model.measure("mae", split) for split in _ERRORS.values()]
        scores = [model.measure(metric, SPLIT) for metric in (SCORE, PAPER_SCORE)]
        accuracy.append((model.name, f"{model.parameters:,}", maes[0].seeds, *maes, *scores))
        right.append((model.name, *(percent(model.measure("exact_match", split)) for split in _RIGHT.values())))
        against.append((model.name, *(cell for name in compared for cell in model.against.get(name, (None, None)))))
        lengths.append((model.name, *(model.measure("mae", split) for split in _LENGTHS)))
        spec = SPECS.get(f"calculator-{model.name}")
        if spec is not None and spec.paper is not None:
            pairs = [(f"{value:.3g}", model.measure(*key).value) for key, value in spec.paper.errors().items()]
            *errors, long = [cell for pair in pairs for cell in pair]
            by_baseline = " … ".join(f"{end:.3g}" for end in model.paper_scores)
            ours = ("–",) * 3 if spec.paper.other_code else (model.paper_long, scores[1].value, by_baseline)
            published.append((model.name, *errors, ours[0], long, f"{spec.paper.score:.3g}", *ours[1:]))
    number = sum(model.against.get(name, (1, None))[1] is not None for model in models for name in compared)
    note = (
        "Welch's t-tests of the logarithms of scores, over seeds; none where a model has one seed. The values of p are "
        f"not corrected: of {number} tests, those below {0.05 / max(number, 1):.2g} are significant at 5 % together."
    )
    of_paper = [head for name in ("MAE in", "MRE in", "MAE out", "MRE out") for head in (f"{name}: paper", "ours")]
    of_paper += ["long: paper", "slip", "true MAE", "score: paper", "ours", "by seed of the baseline"]
    of_scores = [head for name in compared for head in (f"score over {name}", "p")]
    by_length = [split.removeprefix("long/").replace("_", " ") for split in _LENGTHS]
    tables = [
        Table("Accuracy", ("model", "parameters", "seeds", *_ERRORS, "score", "paper's score"), accuracy),
        Table("Right answers", ("model", *_RIGHT), right),
        Table("Scores compared", ("model", *of_scores), against, note=note),
        Table("The paper's figures", ("model", *of_paper), published),
        Table("Error by number of terms", ("model", *by_length), lengths),
    ]
    if models[0].costs:
        rows = [(model.name, *model.costs.values()) for model in models]
        tables.append(Table("Cost", ("model", *models[0].costs), rows))
    return [table for table in tables if table.rows]


def stack_tables(records: Mapping[str, TrainingRecord]) -> list[Table]:
    """Return the table of calculators for longer expressions, by split."""
    groups = grouped(records)
    if not groups:
        return []
    models, notes = [], []
    for name, runs in groups.items():
        models.append({(one.metric, one.split): one for one in pooled(runs)})
        shares = [one for run in runs for one in run.measures if one.metric == "exact_restarts"]
        exact = f", {round(sum(one.value * one.n for one in shares))} of {sum(one.n for one in shares)} machines exact"
        notes.append(f"{name} has {runs[0].parameters:,} parameters and {len(runs)} seeds{exact if shares else ''}")
    rows = []
    for split in [split for metric, split in models[0] if metric == "right"]:
        cells: list[object] = [split, models[0]["right", split].n]
        for model in models:
            errors = [model[f"{which}_relative_error", split].value for which in ("median", "largest")]
            cells += [percent(model["right", split]), *errors]
        rows.append(cells)
    heads = [head for name in groups for head in (f"{name}: right, %", "median error", "largest error")]
    note = (
        f"{'; '.join(notes)}. In brackets: 95 % intervals, which add the errors of items (Wilson's) and seeds "
        "(Student's) in quadrature. The largest error is the mean of each seed's largest."
    )
    return [Table("Longer expressions", ("split", "items", *heads), rows, note=note)]


def variation_tables(records: Mapping[str, Variation], title: str) -> list[Table]:
    """Return tables of all settings, of products with the learning rate that validation chooses, and on dev data."""
    rows, on_dev = [], []
    products: dict[str, tuple[float, tuple[object, ...]]] = {}
    splits = {name: None for one in records.values() for name in one.measures if " dev, " in name}
    for (factor, setting), same in groupby(records.values(), key=lambda one: (one.factor, one.setting)):
        runs = list(same)
        names = runs[0].measures if all(run.measures for run in runs) else ()
        means = {name: over_seeds([run.measures[name] for run in runs]) for name in names}
        shares = [percent(means[name]) if means else None for name in _SHARES]
        cells = (setting, runs[0].parameters, len(runs), *map(means.get, _VARIED), *shares)
        if splits and splits.keys() <= means.keys():
            on_dev.append((setting, *map(means.get, splits)))
        if factor != _PRODUCT:
            rows.append((factor, *cells))
        elif means:
            name, validation = setting.rpartition(", ")[0], means["mae val"].value
            products[name] = min(products.get(name, (validation, cells)), (validation, cells), key=lambda one: one[0])
    heads = ("setting", "parameters", "seeds", *_VARIED.values(), *_SHARES.values())
    tables = [
        Table(title, ("factor", *heads), rows, texts=2),
        Table("Activation × optimiser", heads, [cells for _, cells in products.values()]),
        Table("MAE on the dev splits", ("loss", *(name.removeprefix("mae ") for name in splits)), on_dev),
    ]
    return [table for table in tables if table.rows]


def search_table(records: Mapping[str, Trial]) -> Table:
    """Return the best trials of both searches by layers and dropout."""
    kinds: dict[tuple[str, str, float], list[Trial]] = {}
    for trial in records.values():
        kinds.setdefault((trial.search, "1" if len(trial.units) == 1 else "2 to 16", trial.dropout), []).append(trial)
    rows = []
    for kind, trials in sorted(kinds.items()):
        best, stopped = min(trials, key=lambda one: one.value), sum(one.state == "pruned" for one in trials)
        rows.append((*kind, len(trials), stopped, ", ".join(map(str, best.units)), best.value))
    heads = ("search", "layers", "dropout", "trials", "stopped", "best: units", "MSE on validation")
    return Table("Search", heads, rows, texts=2)


def predicted() -> PredictedLatencies:
    """Predict the networks on a Jetson."""
    predictions = []
    for name in _models():
        data = to_onnx(create(f"calculator-{name}", 0), {"x": torch.zeros(2, 15)}, ["value"], {"x": {0: "batch"}})
        for rows in (1, 64):
            one = predict_file(data, {"x": (rows, 15)}, DEFAULT_BOARD.mode, name)
            predictions.append((name, f"{rows} row{'s' * (rows > 1)}", one))
    return PredictedLatencies.of(predictions)


def _models(records: str = "models") -> dict[str, list[TrainingRecord]]:
    return grouped(read_records(RESULTS / records, TrainingRecord))


def pages() -> dict[Path, str]:
    """Return the documents, with their tables made from the records."""
    vary, losses = (read_records(RESULTS / name, Variation) for name in ("variations", "benchmark_loss"))
    predictions = read_latencies(RESULTS / "predicted.json").table("FP32", speeds=False)
    recurrent = sums_tables(results_of(_models("recurrent")))[:1]  # accuracy
    tables = {
        "RESULTS.md": {
            "models": sums_tables(results_of(_models())),
            "recurrent": recurrent,
            "predicted.json": [predictions],
        },
        "VARIATIONS.md": {
            "variations": variation_tables(vary, "One factor at a time"),
            "benchmark_loss": variation_tables(losses, "Losses, and the best trial"),
            "search": [search_table(read_records(RESULTS / "search", Trial))],
        },
        "stack/RESULTS.md": {"stack": stack_tables(read_records(RESULTS / "stack", TrainingRecord))},
    }
    return {
        HERE / page: with_tables(
            (HERE / page).read_text(),
            "python -m export.papers.calculator.tables",
            {
                f"export/papers/calculator/results/{record}{_fragment(table)}": table
                for record, tables in of_page.items()
                for table in tables
            },
        )
        for page, of_page in tables.items()
    }


def _fragment(table: Table) -> str:
    return f"#{re.sub(r'[^a-z]+', '-', table.title.lower())}" if table.title else ""


def main() -> None:
    """Write the tables of the documents, and their figures."""
    predicted().write(RESULTS / "predicted.json")
    write_pages(pages())
    for name, figure in figures_of(_models()).items():
        write_figure(figure, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
