"""The tables of LIMITS.md from their records: ``python -m export.reduce.tables`` writes them into the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from export.estimate.devices import DEFAULT_BOARD
from export.estimate.predictions import Predictions, read_predictions
from export.estimate.roofline import predict
from export.estimate.sizes import USUAL_BATCHES, USUAL_LENGTHS
from export.estimate.work import transformer_work
from export.models.transformer import LayerShape, TransformerConfig
from export.training.intervals import Difference, points

PAGE, PREDICTED = (Path(__file__).with_name(name) for name in ("LIMITS.md", "predicted.json"))
_RUNS = ("sts-b", "mrpc", "cola", "sts-b-lean")
_TASKS = {"sts-b": "STS-B", "mrpc": "MRPC", "cola": "CoLA", "sts-b-lean": "STS-B, a third"}


def tables() -> dict[str, list[str]]:
    """Return the lines of each table by its name."""
    return {
        "predicted": _predicted(),
        "teachers": _teachers(),
        "recipes": _recipes(),
        "variants": _variants(),
        "int8/holdout": _int8("holdout"),
        "int8/dev": _int8("dev"),
    }


def page_of(text: str) -> str:
    """Return the text of the page with its tables made anew: each follows a marker that names its record."""
    for name, lines in tables().items():
        begin = f"<!-- table: export/reduce/{name.partition('/')[0]}"
        before, _, behind = text.partition(f"{marker(name)}\n\n")
        assert behind, f"the page lacks {begin}"
        text = f"{before}{marker(name)}\n\n" + "\n".join(lines) + "\n\n" + behind.partition("\n\n")[2]
    return text


def marker(name: str) -> str:
    """Return the line above a table."""
    folder, _, split = name.partition("/")
    records = ", ".join(f"export/reduce/int8/{run}.{split}.json" for run in _RUNS) if split else ""
    return f"<!-- table: {records or f'export/reduce/{folder}.json'} by python -m export.reduce.tables -->"


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(PAGE.with_name(f"{name}.json").read_text())["rows"]
    return rows


def _trainings(
    name: str, head: Sequence[str], cells: Callable[[dict[str, Any]], Sequence[object]], aligned: str
) -> list[str]:
    """Return the table of trainings with the first seed, with the name of each task in its first row only."""
    seen, rows = set[str](), []
    for row in _rows(name):
        if row["seed"] == 0:
            rows.append(["" if row["task"] in seen else f"{row['task']}, {row['n']}", _rate(row), *cells(row)])
            seen.add(row["task"])
    return _table(("task, n", "peak rate", *head), rows, f"-r{aligned}")


def predicted() -> Predictions:
    """Predict all-MiniLM-L6-v2 with every layer of one shape."""
    found = []
    for heads, tokens, rows in product((12, 8, 6, 4, 3), USUAL_LENGTHS, USUAL_BATCHES):
        config = TransformerConfig(architecture="bert", dim=384, layers=(LayerShape(heads, 32, 128 * heads),) * 6)
        one = predict(transformer_work(config, tokens, rows), None, DEFAULT_BOARD.mode)
        found.append((f"{heads} heads, {128 * heads:,} units", f"{tokens} tokens, batch {rows}", one))
    return Predictions.of(found)


def _predicted() -> list[str]:
    head, rows = read_predictions(PREDICTED).table()
    return _table(head, rows, "-rrrr")


def _teachers() -> list[str]:
    def cells(row: dict[str, Any]) -> Sequence[object]:
        return f"{row['dropout']:g}", row["epochs"], _hundred(row), _change(row, "difference_to_chosen")

    return _trainings("teachers", ("dropout", "epochs", "metric × 100", "points"), cells, "rrr-")


def _recipes() -> list[str]:
    def cells(row: dict[str, Any]) -> Sequence[object]:
        copies, epochs = row["noisy_copies"], row["epochs"]
        trained = f"{epochs}, and {epochs * copies} on copies with random words" if copies else epochs
        embeddings = "frozen" if row["frozen_embeddings"] else "trained"
        change = _change(row, "difference_to_first")
        return trained, row["imitation"], row["hidden"], embeddings, _hundred(row), change

    head = ("epochs", "imitation", "hidden", "embeddings", "metric × 100", "points")
    return _trainings("recipes", head, cells, "rrr-r-")


def _variants() -> list[str]:
    rows = _rows("variants")
    targets = sorted({row["target_speedup"] for row in rows})
    found: dict[str, list[object]] = {}
    for row in rows:
        before = row.get("before_distillation")
        change = _change(row, "difference_to_256_examples")
        cells = [_hundred(row) + (f", {change}" if change else ""), ""]
        if before:
            low, high = (100 * bound for bound in before["interval"])
            error = before["squared_error_on_holdout"]
            cells[1] = f"{100 * before['value']:.1f} ({low:.1f} … {high:.1f}), {error:.3f}"
        found.setdefault(row["method"], []).extend(cells)
    head = ("for a speed-up of", *(cell for target in targets for cell in (f"{target:g}×, distilled", "before")))
    return _table(head, [[method, *cells] for method, cells in found.items()], "-" * len(head))


def _int8(split: str) -> list[str]:
    records = [json.loads((PAGE.parent / "int8" / f"{run}.{split}.json").read_text()) for run in _RUNS]
    head = (split if split == "dev" else "hold-out", *(f"{_TASKS[one['run']]}, n = {one['n']}" for one in records))
    scored = [{row["method"].partition(":")[0]: row for row in one["scored"]} for one in records]
    methods = dict.fromkeys(method for one in scored for method in one)
    rows = [["FP32", *(f"{100 * one['fp32']:.1f}" for one in records)]]
    for method in methods:
        found = [one.get(method) for one in scored]
        rows.append(
            [method, *(f"{_change(row, 'difference')} [{row['logits_error']:.3f}]" if row else "" for row in found)]
        )
    return _table(head, rows, "-" * len(head))


def _rate(row: dict[str, Any]) -> str:
    return f"{row['peak_learning_rate']:.0e}".replace("e-0", "e-")


def _hundred(row: dict[str, Any]) -> str:
    return f"{100 * row['value']:.1f}"


def _change(row: dict[str, Any], key: str) -> str:
    change = row.get(key)
    return points(msgspec.convert(change, Difference)) if change and (change["value"] or key == "difference") else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], aligned: str) -> list[str]:
    """Return Markdown; ``aligned`` has ``r`` for each column of figures."""
    marks = ["---:" if kind == "r" else "---" for kind in aligned]
    return ["| " + " | ".join(map(str, line)) + " |" for line in (head, marks, *rows)]


if __name__ == "__main__":
    predicted().write(PREDICTED)
    PAGE.write_text(page_of(PAGE.read_text()))
