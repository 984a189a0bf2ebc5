"""Requests that fail: counted, traced, and answered with their error."""

from __future__ import annotations

import time
from typing import Any

from edge.errors import DeadlineExceeded, Overloaded
from edge.instruments.logs import ABOUT, About
from edge.repository.entry import Entry
from edge.serving.call import Arrival
from edge.serving.traces import Traces


class Failures:
    """Counts and traces requests that fail."""

    def __init__(self, traces: Traces | None) -> None:
        self._traces = traces

    def count(self, entry: Entry, model: str, arrival: Arrival, reason: str, stage: str) -> None:
        """Count a request to a model, by the name of its error, or ``Cancelled``, and by where it was dropped."""
        entry.statistics.failed(reason, time.perf_counter_ns() - arrival.started_ns, stage)
        if self._traces:
            self._traces.failed(model, arrival, reason)

    def refused(self, entry: Entry, model: str, arrival: Arrival, error: BaseException) -> None:
        """Count a request that was not submitted, as :meth:`count`."""
        self.count(entry, model, arrival, type(error).__name__, refused_by(error))


def refused_by(error: Any) -> str:
    """Return the stage at which an error refuses a request; empty for one that is wrong."""
    if isinstance(error, Overloaded):
        return error.cause
    return "refused" if isinstance(error, DeadlineExceeded) else ""


def send_error(arrival: Arrival, error: Exception, model: str, request_id: str) -> None:
    """Reply with an error, which the transport may log."""
    token = ABOUT.set(About(model, request_id))
    try:
        arrival.reply(error)
    finally:
        ABOUT.reset(token)
