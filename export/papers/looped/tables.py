"""The tables of RESULTS.md; ``python -m export.papers.looped.tables`` makes them, predictions and the report anew."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from export.estimate.devices import DEFAULT_BOARD
from export.estimate.parts import predict_file
from export.estimate.predictions import PredictedLatencies, read_latencies
from export.estimate.roofline import total
from export.models.transformer import LayerShape
from export.papers.experiment import REPORT, ExperimentReport, Part, read_records, read_settings, report_on
from export.papers.looped.measure import TaskResult
from export.papers.looped.model import (
    PromptConfig,
    PromptTransformer,
    embed_onnx,
    gpt2_shapes,
    step_feeds,
    step_onnx,
    unlooped_onnx,
)
from export.papers.looped.run import Looped, LoopedSettings, equal_table, seeds_of
from export.papers.looped.tiers import PROGRAM, usual_files
from export.papers.looped.trainings import TrainingRecord, TrainingsSettings, rates_table
from export.report.drawing import write_figure
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import Mean, over_seeds, with_interval

_PAGE = Path(__file__).with_name("RESULTS.md")
RESULTS = Path(__file__).with_name("results")
_PREDICTED, _SIDE_BY_SIDE = RESULTS / "predicted.json", RESULTS / "predicted-unlooped.json"
_SERVED = RESULTS / "served.json"
#: In the results: settings and records of :mod:`export.papers.looped.trainings`.
_TRAININGS = "trainings"
_PAIRS = (5, 6, 7, 8, 10, 15, 20)
_KINDS = ("unlooped", "looped")


def page_tables(records: Mapping[str, TaskResult], precisions: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of RESULTS.md by record."""
    main, by_pairs = [], []
    for task in _usual(records):
        errors = {one.name: one.error for one in task.groups}
        ratio = next(one for one in task.ratios if one.other == task.unlooped)
        cells = (_short(errors[str(name)]) for name in (task.looped, task.unlooped))
        main.append((task.function, seeds_of(*ratio.seeds), *cells, _short(ratio.after_all, "{:.2f}")))
        here, there = (task.by_pairs[str(name)] for name in (task.looped, task.unlooped))
        at = [f"{here[pairs] / there[pairs]:.2f}" if pairs in here else "" for pairs in _PAIRS]
        known = task.known_ratio(ratio)
        by_pairs.append((task.function, *at, f"{known.value if isinstance(known, Mean) else known:.2f}"))
    quantised = [
        (
            *(one["run"], one["precision"], f"{one['errors']['30'][0]:.4f}", f"{one['settled_error']:.4f}"),
            *(f"{one['loops']:.1f}", f"{one['never']:.0%}", " / ".join(f"{r:.2f}" for r in one["ratios"].values())),
        )
        for one in precisions["measured"]
    ]
    return {
        "records.jsonl#after-all-pairs": Table(
            "", ("function", "seeds", "looped, 50,561 parameters", "unlooped, 600,385", "looped / unlooped"), main, 2
        ),
        "records.jsonl#by-pairs": Table(
            "", ("function", *(f"after {pairs}" for pairs in _PAIRS), "mean from 5 on"), by_pairs
        ),
        "records.jsonl#equal": equal_table("", records["linear-d5"]),
        "precisions.json": Table(
            "",
            (
                "model",
                "precision",
                "error, 30 loops",
                "error at tolerance 0.05",
                "mean loops to it",
                "not reached in 32 loops",
                "speed relative to full FP32, 1 / 8 / 64 rows",
            ),
            quantised,
            2,
        ),
    }


def _usual(records: Mapping[str, TaskResult]) -> list[TaskResult]:
    """Return the tasks of five dimensions; the report has all."""
    return [task for task in records.values() if task.dims == 5]


def _served(record: Mapping[str, Any]) -> Table:
    """Return the times of two models in one server; intervals are over the rounds, in which they took turns."""
    rows = []
    for clients in sorted({one["concurrency"] for one in record["reports"]}):
        reports = [one for one in record["reports"] if one["concurrency"] == clients]
        sides = [[one["served"] for one in reports if one["model"] == f"{kind}-linear"] for kind in _KINDS]
        times, rates = (np.array([[one[key] for one in of] for of in sides]) for key in ("p50_ms", "per_second"))
        cells = [over_seeds(of.tolist()) for of in (*times, times[0] / times[1], *rates)]
        rows.append((clients, *cells, f"{np.mean([one['loops'] for one in sides[1]]):.1f}"))
    of_kinds = [f"{kind}, {what}" for what in ("p50 in ms", "answers per second") for kind in _KINDS]
    return Table("", ("clients", *of_kinds[:2], "p50, unlooped / looped", *of_kinds[2:], "mean loops"), rows)


def published() -> ExperimentReport[TaskResult]:
    """Return the report on the committed records."""
    parts = [Part(name) for name in read_records(RESULTS, TaskResult)]
    return report_on(Looped(read_settings(RESULTS, LoopedSettings), parts), RESULTS)


def pages() -> dict[Path, str]:
    """Return RESULTS.md and the report, with their tables made from the records."""
    report = published()
    precisions = msgspec.json.decode((RESULTS / "precisions.json").read_bytes())
    tables = page_tables(report.records, precisions) | {
        _PREDICTED.name: read_latencies(_PREDICTED).table(),
        _SIDE_BY_SIDE.name: _side_by_side(read_latencies(_SIDE_BY_SIDE)),
        _SERVED.name: _served(msgspec.json.decode(_SERVED.read_bytes())),
    }
    chosen = RESULTS / _TRAININGS
    tuning, trained = read_settings(chosen, TrainingsSettings).tuning, read_records(chosen, TrainingRecord)
    tables[_TRAININGS] = rates_table(tuning, trained)._replace(title="")
    by_record = {f"export/papers/looped/results/{name}": table for name, table in tables.items()}
    page = with_tables(_PAGE.read_text(), "python -m export.papers.looped.tables", by_record)
    return {_PAGE: page, RESULTS / REPORT: report.page}


def predicted() -> PredictedLatencies:
    """Predict a step of the full and of the reduced model on a Jetson."""
    predictions = []
    for name, shape in (("full", LayerShape(4, 16, 256)), ("reduced", LayerShape(4, 8, 128))):
        config = PromptConfig(dims=5, points=11, dim=64, shapes=(shape,))
        _, step = usual_files(step_onnx(PromptTransformer(config)))["tensorrt"]
        for rows in (1, 8, 64):
            shapes = {key: array.shape for key, array in step_feeds(config, rows).items()}
            one = predict_file(step, shapes, DEFAULT_BOARD.mode, name)
            predictions.append((f"{name}, a step in FP16", f"{rows} row{'s' * (rows > 1)}", one))
    return PredictedLatencies.of(predictions)


def predicted_unlooped() -> PredictedLatencies:
    """Predict an unlooped and a looped model of each function, with the mean loops to the tolerance of bundles."""
    predictions = []
    for task in _usual(published().records):
        loops = next(one.mean_loops for one in task.stopping if one.tolerance == PROGRAM.tolerance)
        looped, files = _files(task.dims, task.points)
        for rows in (1, 64):
            prompts = {"xs": (rows, task.points, task.dims), "ys": (rows, task.points - 1)}
            states = {key: array.shape for key, array in step_feeds(looped, rows).items()}
            size = f"{task.function}, {loops:.1f} loops, {rows} row{'s' * (rows > 1)}"
            whole, embed, step = (
                predict_file(file, shapes, DEFAULT_BOARD.mode, task.function)
                for file, shapes in zip(files, (prompts, prompts, states), strict=True)
            )
            predictions += [("unlooped", size, whole), ("looped", size, total([(1, embed), (loops, step)]))]
    return PredictedLatencies.of(predictions)


@cache
def _files(dims: int, points: int) -> tuple[PromptConfig, tuple[bytes, bytes, bytes]]:
    """Return a looped model's configuration, and for TensorRT the file of an unlooped one and the looped one's two."""
    looped = PromptConfig(dims=dims, points=points, dim=64, shapes=gpt2_shapes(64, 4, 1))
    model = PromptTransformer(looped)
    unlooped = PromptTransformer(replace(looped, shapes=gpt2_shapes(64, 4, 12), injection=None))
    (_, whole), (_, step) = (usual_files(of)["tensorrt"] for of in (unlooped_onnx(unlooped), step_onnx(model)))
    return looped, (whole, embed_onnx(model), step)


def _side_by_side(record: PredictedLatencies) -> Table:
    """Return the table of :func:`predicted_unlooped`, with a row for each size."""
    sizes: dict[str, list[str]] = {}
    for row in record.rows:
        cells = sizes.setdefault(row.size, [])
        cells.append(f"{row.milliseconds:.3g} ms ({row.low_ms:.3g} … {row.high_ms:.3g})")
        if len(cells) == 2:
            cells.append(f"{row.times_faster:.2f}")
    rows = [(size, *cells) for size, cells in sizes.items()]
    return Table("", ("request", "unlooped", "looped", "unlooped / looped"), rows, note=record.table().note)


def _short(value: Mean | None, form: str = "{:#.2g}") -> str:
    return "" if value is None else with_interval(value.value, value.interval, form.format)


if __name__ == "__main__":
    predicted().write(_PREDICTED)
    predicted_unlooped().write(_SIDE_BY_SIDE)
    write_pages(pages())
    for name, figure in published().figures.items():
        write_figure(figure, RESULTS / f"{name}.png")
