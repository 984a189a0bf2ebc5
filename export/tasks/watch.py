"""A training run on the terminal: a bar of steps, and a line for each epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.progress import Progress, TaskID

from edge.cli.output import progress

# torch takes seconds to import, and a command that fails at once need not wait for it.
if TYPE_CHECKING:
    from export.tasks.finetune import Epoch, Step

#: Seconds between two lines where stderr is no terminal, and a bar would say nothing until its end.
_LINE_EVERY = 30.0


class Watch:
    """Moves a bar of steps, and says each epoch's score."""

    def __init__(self, name: str, bar: Progress, task: TaskID) -> None:
        self._name, self._bar, self._task = name, bar, task
        self._said = time.monotonic()

    def on_step(self, step: Step) -> None:
        """Move the bar; say something too where nobody sees it."""
        note = f"loss {step.loss:.3f}, {timedelta(seconds=round(step.seconds_left))} left"
        self._bar.update(self._task, total=step.steps, completed=step.number, note=note)
        if not self._bar.console.is_terminal and time.monotonic() - self._said > _LINE_EVERY:
            self._say(f"step {step.number}/{step.steps}: {note}")

    def on_epoch(self, epoch: Epoch) -> None:
        """Say the epoch's score."""
        self._say(f"epoch {epoch.number}: {epoch.score:.4f} on the hold-out")

    def on_part(self, what: str, done: int, parts: int) -> None:
        """Move the bar of a run whose parts are no steps of training."""
        self._bar.update(self._task, total=parts, completed=done, note=what)
        if not self._bar.console.is_terminal and time.monotonic() - self._said > _LINE_EVERY:
            self._say(f"{what}: {done} of {parts}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self._bar.console.print(f"{self._name}: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def watching(name: str) -> Iterator[Watch]:
    """Show a bar for a run of this name while the block runs."""
    with progress() as bar:
        yield Watch(name, bar, bar.add_task(name, total=None, note=""))
