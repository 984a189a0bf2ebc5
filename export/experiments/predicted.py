"""Predicted times on a Jetson of the models whose measured times documents state: untrained ones of the same shapes.

``python -m export.papers.predicted`` writes the record ``predicted.json`` beside this module, and the tables in
:data:`PAGES` between their markers. Nothing is measured, and no engine is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

import click
import msgspec
import torch

from edge.bench.layer_latencies import PREDICTION, Label
from edge.files import write_whole
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.parts import predict_file
from export.estimate.roofline import Prediction, predict
from export.estimate.sizes import USUAL_BATCHES, USUAL_LENGTHS
from export.estimate.work import transformer_work
from export.models.convert import to_onnx
from export.models.transformer import LayerShape, TransformerConfig
from export.papers.calculator.networks import create
from export.papers.calculator.specs import NAMES
from export.papers.experiment import markdown_table
from export.papers.looped.graphs import step_feeds, step_onnx
from export.papers.looped.model import PromptConfig, PromptTransformer
from export.papers.looped.tier import usual_steps

RECORD = Path(__file__).with_suffix(".json")
_EXPORT = Path(__file__).parents[1]
#: The documents with a table, by the table's name.
PAGES = {
    "layers": _EXPORT / "reduction" / "LIMITS.md",
    "looped": _EXPORT / "looped" / "RESULTS.md",
    "calculator": _EXPORT / "calculator" / "RESULTS.md",
}
_LOOPED = {"full": LayerShape(4, 16, 256), "reduced": LayerShape(4, 8, 128)}
_LOOPED_ROWS, _CALCULATOR_ROWS = (1, 8, 64), (1, 64)


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
    tables = {"layers": layers(), "looped": _looped(), "calculator": _calculators()}
    return Record(DEVICES[DEFAULT_BOARD.board].name, DEFAULT_BOARD.power_mode, PREDICTION, tables)


def layers() -> tuple[Row, ...]:
    """Predict all-MiniLM-L6-v2 with every layer of one shape."""
    shapes = [LayerShape(heads, 32, 128 * heads) for heads in (12, 8, 6, 4, 3)]

    def run(shape: LayerShape, tokens: int, rows: int) -> Prediction:
        config = TransformerConfig(architecture="bert", dim=384, layers=(shape,) * 6)
        return predict(transformer_work(config, tokens, rows), None, DEFAULT_BOARD.mode)

    return _rows(
        (
            f"{shape.num_heads} heads, {shape.ffn_dim:,} units",
            f"{tokens} tokens, batch {rows}",
            run(shape, tokens, rows),
        )
        for shape, tokens, rows in product(shapes, USUAL_LENGTHS, USUAL_BATCHES)
    )


def _looped() -> tuple[Row, ...]:
    found = []
    for name, shape in _LOOPED.items():
        config = PromptConfig(dims=5, points=11, dim=64, shapes=(shape,))
        step = next(one for one in usual_steps(step_onnx(PromptTransformer(config))) if one.runtime == "tensorrt")
        for rows in _LOOPED_ROWS:
            shapes = {key: array.shape for key, array in step_feeds(config, rows).items()}
            found.append(
                (f"{name}, a step in FP16", _batch(rows), predict_file(step.data, shapes, DEFAULT_BOARD.mode, name))
            )
    return _rows(found)


def _calculators() -> tuple[Row, ...]:
    found = []
    for name in NAMES:
        model = create(name, 0)
        data = to_onnx(model, {"x": torch.zeros(2, 15)}, ["value"], {"x": {0: "batch"}})
        for rows in _CALCULATOR_ROWS:
            one = predict_file(data, {"x": (rows, 15)}, DEFAULT_BOARD.mode, name)
            found.append((name.removeprefix("calculator-"), _batch(rows), one))
    return _rows(found)


def _batch(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _rows(found: Iterable[tuple[str, str, Prediction]]) -> tuple[Row, ...]:
    first: dict[str, float] = {}
    return tuple(
        Row(
            name,
            size,
            one.milliseconds,
            one.low_ms,
            one.high_ms,
            first.setdefault(size, one.milliseconds) / one.milliseconds,
        )
        for name, size, one in found
    )


def block_of(record: Record, table: str) -> str:
    """Return a table with its markers and what it says."""
    rows = record.tables[table]
    sizes = list(dict.fromkeys(row.size for row in rows))
    shown: Callable[[Row], str] = _milliseconds if table == "calculator" else _speed
    cells: dict[str, list[str]] = {}
    for row in rows:
        cells.setdefault(row.model, []).append(shown(row))
    precision = "FP32" if table == "calculator" else "FP16"
    text = (
        f"A {record.label}: TensorRT in {precision} on a {record.device} at {record.power_mode}, by `export/estimate`."
    )
    lines = [text, "", *markdown_table(("", *sizes), [(model, *of) for model, of in cells.items()], texts=1)]
    begin, end = markers(table)
    return "\n".join([begin, "", *lines, "", end])


def markers(table: str) -> tuple[str, str]:
    """Return the lines around a table."""
    return f"<!-- {table}: made by python -m export.papers.predicted -->", f"<!-- end of {table} -->"


def _speed(row: Row) -> str:
    return f"{row.times_faster:.2f}×, {_milliseconds(row)}"


def _milliseconds(row: Row) -> str:
    return f"{row.milliseconds:.3g} ms ({row.low_ms:.3g} … {row.high_ms:.3g})"


def _replaced(page: str, block: str, around: Sequence[str]) -> str:
    begin, end = around
    return page.split(begin)[0] + block + page.split(end)[1]


@click.command()
def main() -> None:
    """Predict, and write the record and the tables."""
    record = predict_all()
    write_whole(RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    for table, path in PAGES.items():
        write_whole(path, _replaced(path.read_text(), block_of(record, table), markers(table)).encode())


if __name__ == "__main__":
    main()
