"""What a training reports while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

# torch takes seconds to import, and what shows a training is made before it.
if TYPE_CHECKING:
    from export.training.objective import Score


class Step(msgspec.Struct, frozen=True):
    """Position of a run: step, number of steps, loss of the step, and estimated seconds to the end."""

    number: int
    steps: int
    loss: float
    seconds_left: float


class Epoch(msgspec.Struct, frozen=True):
    """A finished epoch: its number from 1, and its score."""

    number: int
    score: Score


class Observer:
    """Ignores every report; a subclass overrides those that it is for."""

    def on_resume(self, step: int, steps: int) -> None:
        """Accept that an interrupted run resumes after ``step`` of ``steps``."""

    def on_step(self, step: Step) -> None:
        """Accept the position of the run, after each step or some."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Accept the score of a finished epoch."""


SILENT = Observer()
