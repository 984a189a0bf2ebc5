"""Options of an open loop, and the times at which they are due, fixed beforehand.

Clients that wait for each response send less as soon as the server slows down, which hides the overload. Here latency
counts from when a request was due, so no delay of the server or of the generator is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from edge.errors import UsageError

if TYPE_CHECKING:
    from edge.client.connection import Credentials

PATTERNS = POISSON, CONSTANT = ("poisson", "constant")
#: What ends a request at its deadline: the client's gRPC; the server, by the parameter ``timeout``, whose response the
#: client waits for; or whichever is first.
ENFORCERS: Final = ("client", "server", "both")
#: Number of gaps to draw at a time, which bounds the memory of a long schedule.
_BLOCK: Final = 4096


class OfferedRate(NamedTuple):
    """Requests per second, or a multiple of the measured capacity."""

    value: float
    of_capacity: bool

    @classmethod
    def parse(cls, text: str) -> OfferedRate:
        """Read ``200`` or ``3x``; raise a UsageError for anything else."""
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            fix = "Write requests per second, such as 200, or times the measured capacity, such as 3x."
            raise UsageError("--rate", given=text, expected="a number above 0", fix=fix)
        return cls(value, text.endswith("x"))


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to send, and when.

    Attributes:
        pattern: ``poisson``, with independent exponential gaps, or ``constant``.
        seed: of arrivals and requests; equal seeds give equal runs.
        seconds: length of the measurement, which ``requests`` limits, too.
        warm_up_seconds: time before the measurement, at the same rate.
        policy: policy or tier; empty leaves it to the server, as do None and 0 below.
        deadline_ms: from when a request is due; None for none.
        enforcer: one of :data:`ENFORCERS`.
        texts: lines to send in place of the golden inputs, with a tab between the texts of a pair.
        max_outstanding: limit of requests in flight; further ones are not sent, so that memory stays bounded.
    """

    rate: OfferedRate
    pattern: str = POISSON
    seed: int = 0
    seconds: float = 10.0
    requests: int | None = None
    warm_up_seconds: float = 1.0
    rows: int = 1
    policy: str = ""
    priority: int = 0
    deadline_ms: float | None = None
    max_loops: int | None = None
    tolerance: float | None = None
    enforcer: str = "client"
    texts: tuple[str, ...] = ()
    channels: int = 4
    max_outstanding: int = 10_000
    credentials: Credentials | None = None


def due_times(pattern: str, rate: float, seed: int = 0) -> Iterator[float]:
    """Yield the endless, ascending times in seconds at which requests are due, equal for equal seeds."""
    if pattern == CONSTANT:
        yield from (index / rate for index in count())
    generator, now = np.random.default_rng(seed), 0.0
    while True:
        block = now + np.cumsum(generator.exponential(1 / rate, _BLOCK))
        yield from block.tolist()
        now = float(block[-1])


def limited(times: Iterable[float], seconds: float, requests: int | None = None) -> Iterator[float]:
    """Return the times before ``seconds``, and at most ``requests`` of them."""
    return islice(takewhile(lambda time: time < seconds, times), requests)
