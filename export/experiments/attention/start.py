"""Start of a comparison: the dense run, its data, and the settings that all mechanisms share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge.errors import Literally, UsageError
from edge.files import sha256
from export.experiments.attention.records import Settings
from export.heads import SequenceClassifier
from export.runs import WEIGHTS
from export.tasks.models import find
from export.tasks.recipe import Recipe
from export.tasks.registry import task_of
from export.tasks.run import prepare
from export.tasks.task import Data, Task


def settings_of(
    run: Path,
    data_dir: Path,
    recipe: Recipe,
    *,
    limit: int | None,
    seeds: Sequence[int],
    distil: bool = False,
    share: float = 0.5,
    target_speedup: float = 1.76,
    tokens: int | None = None,
    long: int = 128,
    calibration: int = 256,
    calls: int = 60,
    stop_points: float = 0.5,
) -> tuple[Settings, SequenceClassifier, Task, Data]:
    """Return the settings of a comparison, the dense model, its task and the data.

    Args:
        run: of ``fewheads finetune``, on a task whose answers are classes or values, with a BERT.
        tokens: likewise; None is the median of dev.

    Raises:
        UsageError: the run is of another kind.
        CheckpointError: it is malformed.
        DataError: so are the data.
    """
    found = find(run)
    task = task_of(found, run)
    model, architecture = found.head, found.architecture
    assert architecture is not None
    if not isinstance(model, SequenceClassifier) or model.transformer.config.architecture != "bert":
        given = Literally(f"a run on {task.name} with a {architecture.transformer.architecture}")
        expected = "a BERT with one answer for a text"
        raise UsageError(f"{run}", given=given, expected=expected, fix="Give a run on a task of GLUE.")
    data = prepare(task, data_dir, task.reader(run), max_length=architecture.max_length, limit=limit)
    settings = Settings(
        task=task.name,
        run=sha256((run / WEIGHTS).read_bytes()),
        recipe=recipe,
        limit=limit,
        seeds=tuple(seeds),
        distil=distil,
        share=share,
        target_speedup=target_speedup,
        # Of dev, because SST-2's hold-out is phrases like its training set.
        tokens=tokens or int(np.median(next(iter(data.dev.values())).lengths)),
        long=min(long, model.transformer.config.max_positions),
        calibration=calibration,
        calls=calls,
        stop_points=stop_points,
    )
    return settings, model, task, data
