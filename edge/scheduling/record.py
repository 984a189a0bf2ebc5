"""How the last runs of one tier went: what says whether its model is sound, beyond that it was loaded."""

from __future__ import annotations

from edge.errors import RequestError, RunnerError

#: Failures in a row after which a tier is asked for its golden row: were the requests wrong, or is it broken?
SUSPECT_AFTER = 3


class RunRecord:
    """Failures of one tier since its last success. Workers write, anyone may read.

    A request can make a runtime fail, by a token that the model does not know. So failures alone prove nothing: after
    :data:`SUSPECT_AFTER` in a row the tier is suspect, and it is broken when what it was checked with fails too.

    Attributes:
        failures: since the last success. Workers that fail at the same moment may count as one.
        broken: why the tier is not sound; empty while it is.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.broken = ""

    @property
    def suspect(self) -> bool:
        """Whether it has to be found out if the tier is broken, or is so still."""
        return self.failures >= SUSPECT_AFTER or bool(self.broken)

    def succeeded(self) -> None:
        """Note that a run gave an answer: whatever was wrong is over."""
        if self.failures:
            self.failures, self.broken = 0, ""

    def failed(self, error: BaseException) -> None:
        """Note that a run gave none. A request that contradicts the model says nothing of the tier."""
        if isinstance(error, RunnerError) or not isinstance(error, RequestError):
            self.failures += 1

    def condemn(self, reason: str) -> None:
        """Note that the tier fails on what it was checked with."""
        self.failures, self.broken = max(self.failures, 1), reason
