"""Progress of a TensorRT build: its nested phases as one fraction."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edge.runtimes.runtime import BuildProgress, Progress


class _Phases:
    """The progress of a phase counts within the current step of its parent.

    Phases of the same parent that run at once share its step.
    """

    def __init__(self) -> None:
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # name to parent, steps, and steps done
        self._highest = 0.0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        self._phases[phase] = (parent, max(steps, 1), 0)

    def step(self, phase: str, done: int) -> None:
        parent, steps, _ = self._phases[phase]
        self._phases[phase] = (parent, steps, done)

    def finish(self, phase: str) -> None:
        if phase in self._roots():
            self._highest = 1.0
        self._phases.pop(phase, None)

    def fraction(self) -> float:
        """Return the fraction that is done; it never falls."""
        self._highest = max(self._highest, *(self._done(name) for name in self._roots()), 0.0)
        return self._highest

    def _roots(self) -> list[str]:
        return [name for name, (parent, _, _) in self._phases.items() if parent not in self._phases]

    def _done(self, phase: str) -> float:
        _, steps, done = self._phases[phase]
        inside = sum(self._done(name) for name, (parent, _, _) in list(self._phases.items()) if parent == phase)
        return min((done + min(inside, 1.0)) / steps, 1.0)


def monitor(trt: Any, progress: Progress) -> Any:
    """Return a progress monitor, which must outlive the build.

    TensorRT swallows exceptions of callbacks. So the monitor keeps the first one as ``error``, for the caller to
    raise, and cancels the build at its next step.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.phases = _Phases()
            self.error: BaseException | None = None

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._report(phase, lambda: self.phases.start(phase, parent, steps))

        def step_complete(self, phase: str, step: int) -> bool:
            self._report(phase, lambda: self.phases.step(phase, step + 1))
            return self.error is None

        def phase_finish(self, phase: str) -> None:
            self._report(phase, lambda: self.phases.finish(phase))

        def _report(self, phase: str, change: Callable[[], None]) -> None:
            if self.error:  # TensorRT also finishes the phases of a cancelled build
                return
            try:
                change()
                progress(BuildProgress(phase, self.phases.fraction()))
            except BaseException as error:
                self.error = error

    return Monitor()


@contextmanager
def interruptible(watcher: Any) -> Iterator[None]:
    """Let Ctrl-C cancel a build in this thread, and raise the ``error`` of ``watcher``, the monitor, after the build.

    Python would raise KeyboardInterrupt in the next callback of TensorRT, which swallows it.
    """

    def interrupt(number: int, frame: object) -> None:
        watcher.error = watcher.error or KeyboardInterrupt()

    # Only the main thread may set a handler, and a program's own handler stays.
    own = threading.current_thread() is threading.main_thread()
    own = own and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if watcher.error:
        raise watcher.error
