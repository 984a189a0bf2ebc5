"""When requests are due: seconds from the start, fixed before the first one is sent. The one generator of arrivals."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import count, takewhile
from pathlib import Path

import msgspec
import numpy as np

from edge.errors import Literally, UsageError

PATTERNS = POISSON, CONSTANT, BURST = ("poisson", "constant", "burst")
#: Gaps that are drawn at once: a schedule of any length needs the memory of so many.
_BLOCK = 4096


class Arrivals(msgspec.Struct, frozen=True):
    """A pattern of arrivals.

    Attributes:
        pattern: ``poisson``, where the gaps are exponential and independent; ``constant``, where all are the same;
            ``burst``, a Poisson process that is on for the first part of each period and silent for the rest.
        rate: requests per second, in the mean over whole periods.
        seed: of the gaps; equal seeds give equal times.
        period_seconds: of ``burst``.
        on_share: the part of a period of ``burst`` in which requests come, at ``rate / on_share``.
    """

    pattern: str
    rate: float
    seed: int = 0
    period_seconds: float = 1.0
    on_share: float = 0.5

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UsageError: the first one that is wrong.
        """
        if self.pattern not in PATTERNS:
            fix = "Take one of them."
            raise UsageError("--arrivals", given=self.pattern, expected=f"one of {', '.join(PATTERNS)}", fix=fix)
        for name, value, most in (
            ("--rate", self.rate, math.inf),
            ("--burst-period", self.period_seconds, math.inf),
            ("--burst-share", self.on_share, 1.0),
        ):
            if not 0 < value <= most or math.isinf(value):
                expected = "a number above 0" if math.isinf(most) else f"above 0, at most {most:g}"
                raise UsageError(name, given=value, expected=expected, fix="Change it.")

    def times(self) -> Iterator[float]:
        """Yield the times at which requests are due, in order and without end."""
        if self.pattern == CONSTANT:
            return (index / self.rate for index in count())
        if self.pattern == POISSON:
            return _poisson(self.rate, self.seed)
        on_seconds = self.on_share * self.period_seconds
        # The process runs on a clock that stands still while it is silent.
        return (
            moment // on_seconds * self.period_seconds + moment % on_seconds
            for moment in _poisson(self.rate / self.on_share, self.seed)
        )


def _poisson(rate: float, seed: int) -> Iterator[float]:
    generator = np.random.default_rng(seed)
    now = 0.0
    while True:
        block = now + np.cumsum(generator.exponential(1 / rate, _BLOCK))
        yield from block.tolist()
        now = float(block[-1])


def limited(times: Iterable[float], seconds: float, requests: int | None = None) -> Iterator[float]:
    """Yield the times before ``seconds``, and of those the first ``requests``; None is all."""
    early = takewhile(lambda time: time < seconds, times)
    return early if requests is None else (time for _, time in zip(range(requests), early, strict=False))


def read_trace(path: Path) -> array[float]:
    """Read recorded arrivals: lines of JSON, each a number of seconds, or an object whose ``at`` is one.

    Returns:
        The times in seconds from the first of them, which is 0.

    Raises:
        UsageError: the file cannot be read, holds something else, goes back in time, or is empty.
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
        raise UsageError(f"{path}", given=Literally("no times"), expected="one at least", fix=fix)
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
