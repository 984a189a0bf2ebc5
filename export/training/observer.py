"""What a training reports while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

# torch takes seconds to import, and what shows a training is made before it.
if TYPE_CHECKING:
    from export.training.trainer import Epoch, Step


class Observer:
    """Ignores every report; a subclass overrides those that it is for."""

    def on_resume(self, step: int, steps: int) -> None:
        """Accept that an interrupted run resumes after ``step`` of ``steps``."""

    def on_step(self, step: Step) -> None:
        """Accept the position of the run, after each step or some."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Accept the score of a finished epoch."""


SILENT = Observer()
