"""Inputs of a comparison: the dense model, its task and the data, and what all mechanisms of a seed share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge.errors import Raw, UsageError
from edge.files import sha256
from export.data.tokens import Encoded
from export.finetune.models import open_model
from export.finetune.run import prepare, task_of
from export.finetune.task import Data, Task
from export.models.heads import SequenceClassifier
from export.papers.adaptive.mechanisms import Mechanism
from export.papers.adaptive.records import MeasuredCosts, Settings, SharedInputs
from export.papers.adaptive.term import measured_curve
from export.reduce.grid import grid_of
from export.reduce.latency import measure_times
from export.training.points import Point
from export.training.runs import WEIGHTS

_LONG_TOKENS = 128


class Inputs(NamedTuple):
    """The dense model, its task, and the data in its tokens."""

    dense: SequenceClassifier
    task: Task
    data: Data


def read_inputs(run: Path, data_dir: Path, limit: int | None) -> Inputs:
    """Read a run of ``fewheads finetune`` with a BERT on a task with classes or values, and the task's data.

    Raises:
        UsageError: the run has another architecture or task.
    """
    found = open_model(run)
    task = task_of(found, run)
    model, architecture = found.head, found.architecture
    assert architecture is not None
    if not isinstance(model, SequenceClassifier) or model.transformer.config.architecture != "bert":
        given = Raw(f"a run on {task.name} with a {architecture.transformer.architecture}")
        expected = "a BERT with one answer for a text"
        raise UsageError(f"{run}", given=given, expected=expected, fix="Give a run on a task of GLUE.")
    data = prepare(task, data_dir, task.reader(run), max_length=architecture.max_length, limit=limit)
    return Inputs(model, task, data)


def settings_of(inputs: Inputs, run: Path, *, tokens: int | None, **chosen: Any) -> Settings:
    """Return the settings of a comparison.

    Args:
        tokens: in the timed input; None is the median of dev.
        chosen: the other fields of the settings.
    """
    dense, task, data = inputs
    return Settings(
        task=task.name,
        run=sha256((run / WEIGHTS).read_bytes()),
        # Of dev, because SST-2's hold-out is phrases like its training set.
        tokens=tokens or int(np.median(next(iter(data.dev.values())).lengths)),
        long=min(_LONG_TOKENS, dense.transformer.config.max_positions),
        **chosen,
    )


def measure_costs(
    dense: SequenceClassifier,
    settings: Settings,
    mechanisms: Sequence[Mechanism],
    directory: Path,
    on_shape: Callable[[int, int], None],
) -> MeasuredCosts:
    """Time the layers that the mechanisms choose by; nothing else should run meanwhile."""
    config, tokens, cache = dense.transformer.config, settings.tokens, directory / "curve.json"
    curve = measured_curve(config, tokens, cache=cache, calls=settings.calls)
    if not any(mechanism.by_time for mechanism in mechanisms):
        return MeasuredCosts(curve)
    cache = directory / ".reduction" / "latency.json"
    (times,) = measure_times(dense, grid_of(config), [Point(tokens)], cache=cache, on_shape=on_shape)
    return MeasuredCosts(curve, times)


def shared_inputs(inputs: Inputs, settings: Settings, costs: MeasuredCosts, seed: int, directory: Path) -> SharedInputs:
    """Return the common inputs of all mechanisms of a seed."""
    dense, task, data = inputs
    score = task.predict(dense, data.holdout).score(task.headline)
    first = calibration_of(data, settings)
    # A directory for each seed, because jobs that run side by side must not write the same states.
    state = directory / ".reduction" / f"seed{seed}"
    return SharedInputs(
        dense, score, first, seed, settings.share, settings.target_speedup, settings.tokens, costs, state
    )


def calibration_of(data: Data, settings: Settings) -> Encoded:
    """Return the calibration examples of the training set."""
    assert isinstance(data.train, Encoded)
    train, number = data.train, settings.calibration
    return Encoded(train.tokens[:number], train.segments[:number], train.targets[:number])
