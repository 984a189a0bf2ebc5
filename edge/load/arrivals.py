"""Times at which requests are due, in seconds from the start of a run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import count, islice, takewhile
from pathlib import Path

import msgspec
import numpy as np

from edge.errors import Literally, UsageError
from edge.load.plan import CONSTANT, PATTERNS, POISSON

#: Number of gaps to draw at a time, which bounds the memory of a long schedule.
_BLOCK = 4096


def due_times(
    pattern: str, rate: float, seed: int = 0, burst_period_seconds: float = 1.0, burst_share: float = 0.5
) -> Iterator[float]:
    """Return the endless, ascending times at which requests are due.

    Equal seeds give equal times. ``rate`` is in requests per second, averaged over whole periods; within a burst
    requests come at ``rate / burst_share``.

    Raises:
        UsageError: the pattern is unknown, or a number is out of range.
    """
    if pattern not in PATTERNS:
        raise UsageError("--arrivals", given=pattern, expected=f"one of {', '.join(PATTERNS)}", fix="Take one of them.")
    for option, value, most in (
        ("--rate", rate, math.inf),
        ("--burst-period", burst_period_seconds, math.inf),
        ("--burst-share", burst_share, 1.0),
    ):
        if not 0 < value <= most or math.isinf(value):
            expected = "a number above 0" if math.isinf(most) else f"above 0, at most {most:g}"
            raise UsageError(option, given=value, expected=expected, fix="Change it.")
    if pattern == CONSTANT:
        return (index / rate for index in count())
    if pattern == POISSON:
        return _poisson(rate, seed)
    on_seconds = burst_share * burst_period_seconds
    # The process has a clock that stops between bursts.
    return (
        moment // on_seconds * burst_period_seconds + moment % on_seconds
        for moment in _poisson(rate / burst_share, seed)
    )


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
    """Read recorded arrivals: lines of JSON, each a number of seconds, or an object that has one as ``at``.

    Returns:
        The times in seconds from the first of them, which is 0.

    Raises:
        UsageError: the file cannot be read or is empty, or a line is malformed or earlier than the line before.
    """
    times: array[float] = array("d")
    fix = 'Write lines such as 0.25 or {"at": 0.25}, in order of time.'
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                subject = f"{path}, line {number}"
                at = _at(line, subject, fix)
                if times and at < times[-1]:
                    raise UsageError(subject, given=at, expected=f"{times[-1]:g} or later", fix=fix)
                times.append(at)
    except OSError as error:
        raise UsageError(f"{path}", given=Literally(error.strerror), expected="a file to read", fix=fix) from None
    if not times:
        raise UsageError(f"{path}", given=Literally("no times"), expected="at least one", fix=fix)
    return array("d", (time - times[0] for time in times))


def _at(line: bytes, subject: str, fix: str) -> float:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        value = None
    at = value.get("at") if isinstance(value, dict) else value
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        given = Literally(line[:40].decode(errors="replace").strip())
        raise UsageError(subject, given=given, expected="seconds", fix=fix)
    return float(at)
