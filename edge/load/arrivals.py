"""Times at which requests are due, in seconds from the start of a run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import count, islice, takewhile
from pathlib import Path

import msgspec
import numpy as np

from edge.bench.plan import CONSTANT, POISSON
from edge.errors import Raw, UsageError

#: Requests come in bursts of half a second, one in each second.
BURST_PERIOD_SECONDS, BURST_SECONDS = 1.0, 0.5
#: Number of gaps to draw at a time, which bounds the memory of a long schedule.
_BLOCK = 4096


def due_times(pattern: str, rate: float, seed: int = 0) -> Iterator[float]:
    """Return the endless, ascending times at which requests are due, equal for equal seeds.

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
    generator = np.random.default_rng(seed)
    now = 0.0
    while True:
        block = now + np.cumsum(generator.exponential(1 / rate, _BLOCK))
        yield from block.tolist()
        now = float(block[-1])


def limited(times: Iterable[float], seconds: float, requests: int | None = None) -> Iterator[float]:
    """Return the times before ``seconds``, and at most ``requests`` of them."""
    return islice(takewhile(lambda time: time < seconds, times), requests)


def read_trace(path: Path) -> array[float]:
    """Read recorded arrivals, and return them in seconds from the first, which is 0.

    The file has lines of JSON in order of time, each a number of seconds, or an object that has one as ``at``.
    """
    times: array[float] = array("d")
    fix = 'Write lines such as 0.25 or {"at": 0.25}, in order of time.'
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                subject = f"{path}, line {number}"
                times.append(_at(line, subject, fix))
                if len(times) > 1 and times[-1] < times[-2]:
                    raise UsageError(subject, given=times[-1], expected=f"{times[-2]:g} or later", fix=fix)
    except OSError as error:
        raise UsageError(f"{path}", given=Raw(error.strerror), expected="a file to read", fix=fix) from None
    if not times:
        raise UsageError(f"{path}", given=Raw("no times"), expected="at least one", fix=fix)
    return array("d", (time - times[0] for time in times))


def _at(line: bytes, subject: str, fix: str) -> float:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        value = None
    at = value.get("at") if isinstance(value, dict) else value
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        given = Raw(line[:40].decode(errors="replace").strip())
        raise UsageError(subject, given=given, expected="seconds", fix=fix)
    return float(at)
