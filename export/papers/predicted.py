"""Predicted times on a Jetson of the models whose measured times documents state: untrained ones of the same shapes.

``python -m export.papers.predicted`` writes the record ``predicted.json`` beside this module, and the tables in
:data:`PAGES` between their markers. Nothing is measured, and no engine is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import TypeAlias

import click
import msgspec
import torch

from edge.bench.layer_latencies import PREDICTION, Label
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.parts import FirstTier, predict_file
from export.estimate.roofline import Prediction, predict
from export.estimate.sizes import USUAL_BATCHES, USUAL_LENGTHS
from export.estimate.work import transformer_work
from export.models.convert import to_onnx
from export.models.transformer import LayerShape, TransformerConfig
from export.papers.calculator.networks import create
from export.papers.calculator.specs import NAMES
from export.papers.looped.bundle import usual_steps
from export.papers.looped.model import PromptConfig, PromptTransformer, step_feeds, step_onnx
from export.report.table import Table, with_tables, write_pages

RECORD = Path(__file__).with_suffix(".json")
_EXPORT, _RECORD = Path(__file__).parents[1], "export/papers/predicted.json"
#: The documents with a table, by the table's name.
PAGES = {
    "layers": _EXPORT / "reduce" / "LIMITS.md",
    "looped": _EXPORT / "papers" / "looped" / "RESULTS.md",
    "calculator": _EXPORT / "papers" / "calculator" / "RESULTS.md",
}
#: A model, the size of its run, and its latency.
_Predicted: TypeAlias = tuple[str, str, Prediction]


class Row(msgspec.Struct, frozen=True):
    """A model and its run of one size; ``times_faster`` is the latency of the table's first model over its own."""

    model: str
    size: str
    milliseconds: float
    low_ms: float
    high_ms: float
    times_faster: float


class Record(msgspec.Struct, frozen=True):
    """All tables by their names, for TensorRT."""

    device: str
    power_mode: str
    label: Label
    tables: dict[str, tuple[Row, ...]]


def predict_all() -> Record:
    """Predict every model of the tables."""
    tables = {"layers": layers(), "looped": _rows(_looped()), "calculator": _rows(_calculators())}
    return Record(DEVICES[DEFAULT_BOARD.board].name, DEFAULT_BOARD.power_mode, PREDICTION, tables)


def layers() -> tuple[Row, ...]:
    """Predict all-MiniLM-L6-v2 with every layer of one shape."""
    found = []
    for heads, tokens, rows in product((12, 8, 6, 4, 3), USUAL_LENGTHS, USUAL_BATCHES):
        config = TransformerConfig(architecture="bert", dim=384, layers=(LayerShape(heads, 32, 128 * heads),) * 6)
        one = predict(transformer_work(config, tokens, rows), None, DEFAULT_BOARD.mode)
        found.append((f"{heads} heads, {128 * heads:,} units", f"{tokens} tokens, batch {rows}", one))
    return _rows(found)


def _looped() -> Iterator[_Predicted]:
    for name, shape in (("full", LayerShape(4, 16, 256)), ("reduced", LayerShape(4, 8, 128))):
        config = PromptConfig(dims=5, points=11, dim=64, shapes=(shape,))
        _, step = usual_steps(step_onnx(PromptTransformer(config)))["tensorrt"]
        for rows in (1, 8, 64):
            shapes = {key: array.shape for key, array in step_feeds(config, rows).items()}
            yield f"{name}, a step in FP16", _batch(rows), predict_file(step, shapes, DEFAULT_BOARD.mode, name)


def _calculators() -> Iterator[_Predicted]:
    for name in NAMES:
        data = to_onnx(create(name, 0), {"x": torch.zeros(2, 15)}, ["value"], {"x": {0: "batch"}})
        for rows in (1, 64):
            found = predict_file(data, {"x": (rows, 15)}, DEFAULT_BOARD.mode, name)
            yield name.removeprefix("calculator-"), _batch(rows), found


def _batch(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _rows(predicted: Iterable[_Predicted]) -> tuple[Row, ...]:
    first = FirstTier()
    return tuple(
        Row(name, size, one.milliseconds, one.low_ms, one.high_ms, first.times_faster(size, one.milliseconds))
        for name, size, one in predicted
    )


def pages() -> dict[Path, str]:
    """Return the documents, with their tables made from the record."""
    record = msgspec.json.decode(RECORD.read_bytes(), type=Record)
    return {
        path: with_tables(path.read_text(), "python -m export.papers.predicted", {_RECORD: _table(record, name)})
        for name, path in PAGES.items()
    }


def _table(record: Record, name: str) -> Table:
    """Return a table of a record, and what it says."""
    rows, is_calculator = record.tables[name], name == "calculator"
    cells: dict[str, list[str]] = {}
    for row in rows:
        speed = "" if is_calculator else f"{row.times_faster:.2f}×, "
        band = f"{row.milliseconds:.3g} ms ({row.low_ms:.3g} … {row.high_ms:.3g})"
        cells.setdefault(row.model, []).append(speed + band)
    where = f"{'FP32' if is_calculator else 'FP16'} on a {record.device} at {record.power_mode}"
    heads = ("", *dict.fromkeys(row.size for row in rows))
    note = f"A {record.label}: TensorRT in {where}, by `export/estimate`."
    return Table("", heads, [(model, *of) for model, of in cells.items()], note=note)


@click.command()
def main() -> None:
    """Predict, and write the record and the tables."""
    write_pages({RECORD: msgspec.json.format(msgspec.json.encode(predict_all()), indent=1).decode() + "\n"})
    write_pages(pages())


if __name__ == "__main__":
    main()
