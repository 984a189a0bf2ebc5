"""The tables of LIMITS.md of trainings and INT8; ``python -m export.reduce.tables`` writes them from their records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from export.estimate.devices import DEFAULT_BOARD
from export.estimate.predictions import PredictedLatencies, read_latencies
from export.estimate.roofline import predict
from export.estimate.sizes import USUAL_BATCHES, USUAL_LENGTHS
from export.estimate.work import transformer_work
from export.models.transformer import LayerShape, TransformerConfig
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import Difference, points

PAGE, PREDICTED = (Path(__file__).with_name(name) for name in ("LIMITS.md", "predicted.json"))
_RUNS = ("sts-b", "mrpc", "cola", "sts-b-lean")
_TASKS = {"sts-b": "STS-B", "mrpc": "MRPC", "cola": "CoLA", "sts-b-lean": "STS-B, a third"}
_EMBEDDERS = {"minilm": "all-MiniLM-L6-v2", "mpnet": "all-mpnet-base-v2"}


def pages() -> dict[Path, str]:
    """Return LIMITS.md, with its tables made from the records."""
    tables = {f"export/reduce/{table.title}.json": table for table in (_teachers(), _recipes(), _variants())}
    tables["export/reduce/predicted.json"] = read_latencies(PREDICTED).table()
    for runs, split in product((_RUNS, tuple(_EMBEDDERS)), ("holdout", "dev")):
        tables[", ".join(f"export/reduce/int8/{run}.{split}.json" for run in runs)] = _int8(runs, split)
    return {PAGE: with_tables(PAGE.read_text(), "python -m export.reduce.tables", tables)}


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(PAGE.with_name(f"{name}.json").read_text())["rows"]
    return rows


def _trainings(name: str, heads: Sequence[str], cells: Callable[[dict[str, Any]], Sequence[object]]) -> Table:
    """Return the table of trainings with the first seed, with the name of each task in its first row only."""
    seen, rows = set[str](), []
    for row in _rows(name):
        if row["seed"] == 0:
            rows.append(["" if row["task"] in seen else f"{row['task']}, {row['n']}", _rate(row), *cells(row)])
            seen.add(row["task"])
    return Table(name, ("task, n", "peak rate", *heads), rows)


def predicted() -> PredictedLatencies:
    """Predict all-MiniLM-L6-v2 with every layer of one shape."""
    found = []
    for heads, tokens, rows in product((12, 8, 6, 4, 3), USUAL_LENGTHS, USUAL_BATCHES):
        config = TransformerConfig(architecture="bert", dim=384, layers=(LayerShape(heads, 32, 128 * heads),) * 6)
        one = predict(transformer_work(config, tokens, rows), None, DEFAULT_BOARD.mode)
        found.append((f"{heads} heads, {128 * heads:,} units", f"{tokens} tokens, batch {rows}", one))
    return PredictedLatencies.of(found)


def _teachers() -> Table:
    def cells(row: dict[str, Any]) -> Sequence[object]:
        return f"{row['dropout']:g}", row["epochs"], _hundred(row), _change(row, "difference_to_chosen")

    return _trainings("teachers", ("dropout", "epochs", "metric × 100", "points"), cells)


def _recipes() -> Table:
    def cells(row: dict[str, Any]) -> Sequence[object]:
        copies, epochs = row["noisy_copies"], row["epochs"]
        trained = f"{epochs}, and {epochs * copies} on copies with random words" if copies else epochs
        embeddings = "frozen" if row["frozen_embeddings"] else "trained"
        change = _change(row, "difference_to_first")
        return trained, row["imitation"], row["hidden"], embeddings, _hundred(row), change

    heads = ("epochs", "imitation", "hidden", "embeddings", "metric × 100", "points")
    return _trainings("recipes", heads, cells)


def _variants() -> Table:
    rows = _rows("variants")
    targets = sorted({row["target_speedup"] for row in rows})
    methods: dict[str, list[object]] = {}
    for row in rows:
        before = row.get("before_distillation")
        change = _change(row, "difference_to_256_examples")
        cells = [_hundred(row) + (f", {change}" if change else ""), ""]
        if before:
            low, high = (100 * bound for bound in before["interval"])
            error = before["squared_error_on_holdout"]
            cells[1] = f"{100 * before['value']:.1f} ({low:.1f} … {high:.1f}), {error:.3f}"
        methods.setdefault(row["method"], []).extend(cells)
    heads = ("for a speed-up of", *(cell for target in targets for cell in (f"{target:g}×, distilled", "before")))
    return Table("variants", heads, [[method, *cells] for method, cells in methods.items()], len(heads))


def _int8(runs: Sequence[str], split: str) -> Table:
    records = [json.loads((PAGE.parent / "int8" / f"{run}.{split}.json").read_text()) for run in runs]
    heads = (
        split if split == "dev" else "hold-out",
        *(f"{(_TASKS | _EMBEDDERS)[one['run']]}, n = {one['n']}" for one in records),
    )
    scored = [{row["method"].partition(":")[0]: row for row in one["scored"]} for one in records]
    methods = dict.fromkeys(method for one in scored for method in one)
    rows = [["FP32", *(f"{100 * one['fp32']:.1f}" for one in records)]]
    for method in methods:
        cells = [one.get(method) for one in scored]
        rows.append(
            [method, *(f"{_change(row, 'difference')} [{row['logits_error']:.3f}]" if row else "" for row in cells)]
        )
    return Table(split, heads, rows, len(heads))


def _rate(row: dict[str, Any]) -> str:
    return f"{row['peak_learning_rate']:.0e}".replace("e-0", "e-")


def _hundred(row: dict[str, Any]) -> str:
    return f"{100 * row['value']:.1f}"


def _change(row: dict[str, Any], key: str) -> str:
    change = row.get(key)
    return points(msgspec.convert(change, Difference)) if change and (change["value"] or key == "difference") else ""


if __name__ == "__main__":
    predicted().write(PREDICTED)
    write_pages(pages())
