"""Progress of a whole build: compilation, golden check and writing, with the estimated time left."""

from __future__ import annotations

import time

from edge.runtimes.runtime import BuildProgress, Progress

#: Seconds between two reports: a compiler takes thousands of steps.
_INTERVAL = 0.1
#: No estimate before this fraction is done.
_KNOWN_FROM = 0.02
#: What compilation is of the whole; the rest is for the golden check and the disk.
COMPILED = 0.95


class Meter:
    """Reports the position of a build, at most ten times a second, with the time left.

    Args:
        report: called with each position; None reports nothing.
    """

    def __init__(self, report: Progress | None) -> None:
        self._report = report
        self._began = time.monotonic()
        self._reported = -_INTERVAL
        self._fraction = 0.0

    @property
    def seconds(self) -> float:
        """The time since the build began."""
        return time.monotonic() - self._began

    def compiled(self, progress: BuildProgress) -> None:
        """Take the position of the compiler: the progress that a runtime reports."""
        self.at(progress.phase, progress.fraction * COMPILED)

    def at(self, phase: str, fraction: float) -> None:
        """Take a position in the whole build; the reported position never falls."""
        self._fraction = max(self._fraction, min(fraction, 1.0))
        now = time.monotonic()
        if not self._report or (now - self._reported < _INTERVAL and self._fraction < COMPILED):
            return
        self._reported = now
        self._report(BuildProgress(phase, self._fraction, self._left(now)))

    def _left(self, now: float) -> float | None:
        if self._fraction < _KNOWN_FROM:
            return None
        return (now - self._began) * (1 - self._fraction) / self._fraction
