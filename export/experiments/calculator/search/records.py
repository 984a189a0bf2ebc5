"""What a search keeps of a trial, and its result."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from export.experiments.calculator.search.space import Proposal
from export.runs import RunMetrics

State = Literal["complete", "pruned", "diverged"]


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A trial.

    Attributes:
        number: from 0, without trials that were killed.
        value: the least mean squared error on validation of its epochs; None if it diverged in the first.
        parameters: of the network.
        values: what was proposed, by name.
    """

    number: int
    state: State
    value: float | None
    parameters: int
    epochs: int
    seconds: float
    values: dict[str, Any]
    proposal: Proposal


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result: the best trial, and the metrics of the runs that were trained as it was, by name.

    Attributes:
        trials: how many there are, the pruned and the diverged ones included.
        better: the best trials, the first 10.
    """

    model: str
    trials: int
    pruned: int
    diverged: int
    best: TrialRecord
    better: tuple[TrialRecord, ...]
    runs: dict[str, RunMetrics]
