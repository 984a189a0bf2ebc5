"""The tables of RESULTS.md; ``python -m export.papers.looped.tables`` makes them, predictions and the report anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from export.estimate.devices import DEFAULT_BOARD
from export.estimate.parts import predict_file
from export.estimate.predictions import PredictedLatencies, read_latencies
from export.models.transformer import LayerShape
from export.papers.experiment import REPORT, ExperimentReport, Part, read_records, read_settings, report_on
from export.papers.looped.bundle import usual_steps
from export.papers.looped.measure import TaskResult
from export.papers.looped.model import PromptConfig, PromptTransformer, step_feeds, step_onnx
from export.papers.looped.run import Looped, LoopedSettings, seeds_of
from export.report.drawing import write_figure
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import Mean, with_interval

_PAGE = Path(__file__).with_name("RESULTS.md")
RESULTS = Path(__file__).with_name("results")
_PREDICTED = RESULTS / "predicted.json"


def page_tables(records: Mapping[str, TaskResult], precisions: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of RESULTS.md by record."""
    main = []
    for task in records.values():
        errors = {one.name: one.error for one in task.groups}
        ratio = next(one for one in task.ratios if one.other == task.unlooped)
        cells = (_short(errors[str(name)]) for name in (task.looped, task.unlooped))
        main.append(
            (
                task.function,
                seeds_of(*ratio.seeds),
                *cells,
                _short(ratio.after_all, "{:.2f}"),
                _short(ratio.overall, "{:.3f}"),
            )
        )
    quantised = [
        (
            *(one["run"], one["precision"], f"{one['errors']['30'][0]:.4f}", f"{one['settled_error']:.4f}"),
            *(f"{one['loops']:.1f}", f"{one['never']:.0%}", " / ".join(f"{r:.2f}" for r in one["ratios"].values())),
        )
        for one in precisions["measured"]
    ]
    return {
        "records.jsonl": Table(
            "",
            (
                "function",
                "seeds",
                "looped, 50,561 parameters",
                "unlooped, 600,385",
                "looped / unlooped",
                "of means over all numbers of pairs",
            ),
            main,
            2,
        ),
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


def published() -> ExperimentReport[TaskResult]:
    """Return the report on the committed records."""
    parts = [Part(name) for name in read_records(RESULTS, TaskResult)]
    return report_on(Looped(read_settings(RESULTS, LoopedSettings), parts), RESULTS)


def pages() -> dict[Path, str]:
    """Return RESULTS.md and the report, with their tables made from the records."""
    report, precisions = published(), msgspec.json.decode((RESULTS / "precisions.json").read_bytes())
    tables = page_tables(report.records, precisions) | {"predicted.json": read_latencies(_PREDICTED).table()}
    by_record = {f"export/papers/looped/results/{name}": table for name, table in tables.items()}
    page = with_tables(_PAGE.read_text(), "python -m export.papers.looped.tables", by_record)
    return {_PAGE: page, RESULTS / REPORT: report.page}


def predicted() -> PredictedLatencies:
    """Predict a step of the full and of the reduced model on a Jetson."""
    predictions = []
    for name, shape in (("full", LayerShape(4, 16, 256)), ("reduced", LayerShape(4, 8, 128))):
        config = PromptConfig(dims=5, points=11, dim=64, shapes=(shape,))
        _, step = usual_steps(step_onnx(PromptTransformer(config)))["tensorrt"]
        for rows in (1, 8, 64):
            shapes = {key: array.shape for key, array in step_feeds(config, rows).items()}
            one = predict_file(step, shapes, DEFAULT_BOARD.mode, name)
            predictions.append((f"{name}, a step in FP16", f"{rows} row{'s' * (rows > 1)}", one))
    return PredictedLatencies.of(predictions)


def _short(value: Mean | None, form: str = "{:#.2g}") -> str:
    return "" if value is None else with_interval(value.value, value.interval, form.format)


if __name__ == "__main__":
    predicted().write(_PREDICTED)
    write_pages(pages())
    for name, figure in published().figures.items():
        write_figure(figure, RESULTS / f"{name}.png")
