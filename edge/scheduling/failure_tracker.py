"""Consecutive failures of one tier, and whether it is broken."""

from __future__ import annotations

from edge.errors import RequestError, RunnerError

#: Consecutive failures after which the supervisor runs a tier's golden row, to tell a broken tier from wrong requests.
SUSPECT_AFTER = 3


class FailureTracker:
    """Failures of one tier since its last success. Workers write, any thread may read.

    A request can make a runtime fail, for example with a token that the model does not know, so failures alone prove
    nothing: after :data:`SUSPECT_AFTER` in a row the tier is suspect, and it is broken when its golden row fails too.

    Attributes:
        count: failures since the last success. Workers that fail at the same moment may count as one.
        broken: why the tier is broken; empty while it is not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.broken = ""

    @property
    def suspect(self) -> bool:
        """Whether the tier has to run its golden row, because it may be broken or still is."""
        return self.count >= SUSPECT_AFTER or bool(self.broken)

    def succeeded(self) -> None:
        """Record a run that gave an answer; the tier is sound."""
        if self.count:
            self.count, self.broken = 0, ""

    def failed(self, error: BaseException) -> None:
        """Record a run that failed. An error that only the request caused does not count."""
        if isinstance(error, RunnerError) or not isinstance(error, RequestError):
            self.count += 1

    def mark_broken(self, reason: str) -> None:
        """Record that the tier failed on its golden row."""
        self.count, self.broken = max(self.count, 1), reason
