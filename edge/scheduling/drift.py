"""Corrects latency predictions from observed deadline misses.

Run times are averaged over many runs, so their predictions are stale while the machine slows down, and later
requests may lengthen the runs before one that waits. Either way, a missed deadline shows it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

#: A promise that was broken raises the factor by so much at most, one that was kept lowers it by so much. In a queue
#: whose runs take one or three times as long by turns, and that is asked three times what it can do, 97 promises of 100
#: are kept with these, 86 without, and 4 % more are answered in time.
_UP, _DOWN = 1.25, 0.999
#: Beyond that a busy server would refuse so much that it is idle between.
_MOST = 2.5
#: Without news the factor goes back to 1, so that a server that refuses everything tries again.
_FORGET_SECONDS = 30.0
#: A promise with more room than that tells nothing: of a short time even a large multiple is in time.
_TELLING = 0.5
#: Whoever cancels so shortly before the deadline has given up because of it.
_CLOCK_SECONDS = 0.005


class Promise(NamedTuple):
    """What a request was let in with.

    Attributes:
        at: when, in ``time.monotonic()`` seconds.
        seconds: that it was predicted to take, before any factor.
        left: seconds to its deadline.
    """

    at: float
    seconds: float
    left: float


class Drift:
    """A factor, 1 or more, for predictions of when a request will be answered.

    The scheduler's lock guards it.
    """

    def __init__(self) -> None:
        self._factor = 1.0
        self._at = -math.inf

    def factor(self, now: float) -> float:
        """Return what predictions are to be multiplied by, at ``time.monotonic()`` seconds."""
        return 1.0 + (self._factor - 1.0) * math.exp(min(self._at - now, 0.0) / _FORGET_SECONDS)

    def kept(self, now: float, promise: Promise | None) -> None:
        """Learn from a request that was computed by now, maybe too late."""
        if promise and now - promise.at > promise.left:
            self._broken(now, promise)
        elif promise and self._telling(now, promise):
            self._factor, self._at = max(self.factor(now) * _DOWN, 1.0), now

    def left(self, now: float, promise: Promise | None) -> None:
        """Learn from a request that left the queue by now: it shows something only if its time had run out."""
        if promise and now - promise.at > promise.left - _CLOCK_SECONDS:
            self._broken(now, promise)

    def _broken(self, now: float, promise: Promise) -> None:
        if self._telling(now, promise):
            factor = self.factor(now)
            # As far as the prediction was wrong, and not at one go: one slow run makes many late.
            wrong = (now - promise.at) / promise.seconds
            self._factor, self._at = min(factor * _UP, max(wrong * _UP, factor), _MOST), now

    def _telling(self, now: float, promise: Promise) -> bool:
        return promise.seconds * self.factor(now) >= _TELLING * promise.left
