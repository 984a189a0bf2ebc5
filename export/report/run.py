"""The report of a run directory."""

from __future__ import annotations

from pathlib import Path

from edge.errors import Raw, UsageError
from export.finetune.models import OpenedModel, open_model
from export.finetune.run import task_of
from export.report.items import Items, items_of
from export.report.numbers import Report, report_of


def read_report(run: Path, data_dir: Path) -> tuple[Report, Items]:
    """Return the report of a run of ``fewheads finetune`` or ``reduce``, and the items that it is about.

    Args:
        data_dir: data directory of a task of Fewheads; own data are where they were, or below it.

    Raises:
        UsageError: the run is not on a task with classes or values.
        DataError: the data are missing, or are not those of the training.
    """
    found: OpenedModel = open_model(run)
    task = task_of(found, run)
    assert found.architecture is not None
    if not found.architecture.labels:
        given, expected = Raw(f"a run on {task.name}"), "a run on a task with classes or values"
        raise UsageError(f"{run}", given=given, expected=expected, fix="Its metrics are in metrics.json.")
    items = items_of(task, found.architecture, data_dir)
    return report_of(run, found, task, items), items
