"""Options of an open loop: which requests to send, and the times at which they are due, fixed beforehand.

Clients that wait for each response send less as soon as the server slows down, which hides the overload. Here latency
counts from when a request was due, so no delay of the server or of the generator is hidden.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import count, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from edge.errors import Raw, UsageError

if TYPE_CHECKING:
    from edge.client.connection import Credentials

PATTERNS = POISSON, CONSTANT, BURST = ("poisson", "constant", "burst")
#: Requests come in bursts of half a second, one in each second.
BURST_PERIOD_SECONDS, BURST_SECONDS = 1.0, 0.5
#: What ends a request at its deadline: the client's gRPC; the server, by the parameter ``timeout``, whose response the
#: client waits for; or whichever is first.
ENFORCERS: Final = ("client", "server", "both")
_MIX_FIX: Final = "Write VALUE, or VALUE=PARTS,VALUE=PARTS, such as 1=1,5=9."
#: Number of gaps to draw at a time, which bounds the memory of a long schedule.
_BLOCK: Final = 4096


class OfferedRate(NamedTuple):
    """Requests per second, or a multiple of the measured capacity."""

    value: float
    of_capacity: bool

    @classmethod
    def parse(cls, text: str) -> OfferedRate:
        """Read ``200`` or ``3x``; raise a UsageError for anything else."""
        value = _number(text.removesuffix("x"))
        if not 0 < value < math.inf:
            fix = "Write requests per second, such as 200, or times the measured capacity, such as 3x."
            raise UsageError("--rate", given=text, expected="a number above 0", fix=fix)
        return cls(value, text.endswith("x"))


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to send, and when.

    A mix maps values to their parts of all requests; an empty one leaves the value to the server.

    Attributes:
        rate: None with a trace.
        pattern: ``poisson``, with independent exponential gaps; ``constant``; or ``burst``, a Poisson process that
            pauses in the second half of each second.
        trace: recorded arrivals in place of a pattern, in seconds from the first.
        seed: of arrivals and requests; equal seeds give equal runs.
        seconds: length of the measurement, which ``requests`` limits, too.
        warm_up_seconds: time before the measurement, at the same rate; a trace has none.
        policies: mix of policies and tiers, as mixes are the next four.
        deadlines_ms: from when a request is due.
        enforcer: one of :data:`ENFORCERS`.
        texts: lines to send in place of the golden inputs, with a tab between the texts of a pair.
        patience_seconds: time after which a response is lost if no deadline of the client ends the request.
        max_outstanding: limit of requests in flight; further ones are not sent, so that memory stays bounded.
    """

    rate: OfferedRate | None = None
    pattern: str = POISSON
    trace: array[float] | None = None
    seed: int = 0
    seconds: float = 10.0
    requests: int | None = None
    warm_up_seconds: float = 1.0
    rows: int = 1
    policies: dict[str, float] = {}
    priorities: dict[float, float] = {}
    deadlines_ms: dict[float, float] = {}
    max_loops: dict[float, float] = {}
    tolerances: dict[float, float] = {}
    enforcer: str = "client"
    texts: tuple[str, ...] = ()
    channels: int = 4
    patience_seconds: float = 30.0
    max_outstanding: int = 10_000
    credentials: Credentials | None = None


def parse_mix(option: str, text: str) -> dict[str, float]:
    """Read ``VALUE`` or ``VALUE=PARTS,VALUE=PARTS``; raise a UsageError for anything else."""
    mix: dict[str, float] = {}
    for item in text.split(","):
        value, _, part = item.strip().partition("=")
        parts = _number(part or "1")
        if not value or not 0 < parts < math.inf:
            raise UsageError(option, given=item, expected="a value and its parts, a number above 0", fix=_MIX_FIX)
        mix[value] = mix.get(value, 0.0) + parts
    return mix


def parse_number_mix(option: str, text: str, least: float, most: float, *, whole: bool = False) -> dict[float, float]:
    """Read a mix of numbers, or whole numbers, from ``least`` to ``most``; as :func:`parse_mix`."""
    mix: dict[float, float] = {}
    for value, parts in parse_mix(option, text).items():
        number = _number(value)
        if not least <= number <= most or (whole and not number.is_integer()):
            expected = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
            expected = f"a whole number, {expected}" if whole else expected
            raise UsageError(option, given=value, expected=expected, fix=_MIX_FIX)
        mix[number] = mix.get(number, 0.0) + parts
    return mix


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def due_times(pattern: str, rate: float, seed: int = 0) -> Iterator[float]:
    """Return the endless, ascending times in seconds at which requests are due, equal for equal seeds.

    ``rate`` is in requests per second, in bursts as the mean over whole periods.
    """
    if pattern == CONSTANT:
        return (index / rate for index in count())
    if pattern == POISSON:
        return _poisson(rate, seed)
    # The process has a clock that stops between bursts.
    times = _poisson(rate * BURST_PERIOD_SECONDS / BURST_SECONDS, seed)
    return (time // BURST_SECONDS * BURST_PERIOD_SECONDS + time % BURST_SECONDS for time in times)


def _poisson(rate: float, seed: int) -> Iterator[float]:
    generator, now = np.random.default_rng(seed), 0.0
    while True:
        block = now + np.cumsum(generator.exponential(1 / rate, _BLOCK))
        yield from block.tolist()
        now = float(block[-1])


def limited(times: Iterable[float], seconds: float, requests: int | None = None) -> Iterator[float]:
    """Return the times before ``seconds``, and at most ``requests`` of them."""
    return islice(takewhile(lambda time: time < seconds, times), requests)


class _Arrival(msgspec.Struct):
    at: float


def read_trace(path: Path) -> array[float]:
    """Read recorded arrivals, and return them in seconds from the first, which is 0.

    The file has lines of JSON in order of time, each a number of seconds, or an object that has one as ``at``.
    """
    try:
        arrivals = msgspec.json.Decoder(float | _Arrival).decode_lines(path.read_bytes())
        times = [arrival.at if isinstance(arrival, _Arrival) else arrival for arrival in arrivals]
        given = "no times" if not times else "" if times == sorted(times) else "times out of order"
    except (OSError, msgspec.DecodeError) as error:
        given = str(error)
    if given:
        expected, fix = "seconds, a line each", 'Write lines such as 0.25 or {"at": 0.25}, in order of time.'
        raise UsageError(f"trace {path}", given=Raw(given), expected=expected, fix=fix)
    return array("d", (time - times[0] for time in times))
