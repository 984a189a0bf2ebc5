"""Progress of a training run: a bar of steps, and a line for each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress, TaskID

from edge.cli.output import progress, remark
from export.training.objective import Epoch, Observer, Step


class Watch(Observer):
    """Moves a bar of steps with loss and score, and prints a line when a run resumes.

    Args:
        lines: prints a line for each epoch's score, too.
    """

    def __init__(self, name: str, bar: Progress, task: TaskID, *, lines: bool = True) -> None:
        self._name, self._bar, self._task, self._lines = name, bar, task, lines
        self._score = ""

    def on_resume(self, step: int, steps: int) -> None:
        """Print that an interrupted run resumes."""
        remark(f"{self._name}: resumes an interrupted run at step {step} of {steps}")

    def on_step(self, step: Step) -> None:
        """Move the bar."""
        note = f"loss {step.loss:.3g}{self._score}"
        self._bar.update(self._task, total=step.steps, completed=step.number, note=note)

    def on_epoch(self, epoch: Epoch) -> None:
        """Show the epoch's score."""
        self._score = f", {epoch.score}"
        if self._lines:
            remark(f"{self._name}: epoch {epoch.number}: {epoch.score} on the hold-out")

    def on_part(self, what: str, done: int, parts: int) -> None:
        """Move the bar of work other than training; ``what`` names its parts."""
        self._bar.update(self._task, total=parts, completed=done, note=what)


@contextmanager
def watching(name: str, *, lines: bool = True) -> Iterator[Watch]:
    """Show a bar for a run of this name while the block runs."""
    with progress() as bar:
        task = bar.add_task(name, total=None, note="")
        yield Watch(name, bar, task, lines=lines)
        # Early stopping ends before the last step; the bar ends there, too.
        bar.update(task, total=bar.tasks[0].completed)


@contextmanager
def watching_each(what: str) -> Iterator[Callable[[str], Watch]]:
    """Show one bar for several runs while the block runs; the function begins the next one, of this name."""
    with progress() as bar:
        task = bar.add_task(what, total=None, note="")

        def begin(name: str) -> Watch:
            bar.reset(task, description=name, total=None)
            return Watch(name, bar, task, lines=False)

        yield begin


@contextmanager
def counting(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar while the block runs; the function moves it: a part's name, what is done of it, and the whole."""
    with progress() as bar:
        task = bar.add_task(what, total=None, note="")
        yield lambda name, done, whole: bar.update(task, description=name, completed=done, total=whole)
