"""What a search keeps of a trial, and its result."""

from __future__ import annotations

from typing import Any

import msgspec

from export.papers.calculator.search.space import Proposal
from export.training.runs import RunMetrics


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A trial.

    Attributes:
        number: from 0, without trials that were killed.
        value: the least mean squared error on validation of its epochs; None if it diverged.
        parameters: of the network.
        values: what was proposed, by name.
    """

    number: int
    value: float | None
    parameters: int
    epochs: int
    seconds: float
    values: dict[str, Any]
    proposal: Proposal


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result: the best trial, and the metrics of the runs that were trained as it was, by name.

    Attributes:
        trials: how many there are.
        diverged: of these.
        better: the best 10 trials.
    """

    model: str
    trials: int
    diverged: int
    best: TrialRecord
    better: tuple[TrialRecord, ...]
    runs: dict[str, RunMetrics]
