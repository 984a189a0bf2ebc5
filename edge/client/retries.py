"""Retries of failed calls, and the servers that they go to.

Only two kinds of failure are transient: UNAVAILABLE, where no answer came back, and RESOURCE_EXHAUSTED with a hint when
to try again. An inference changes nothing at the server, so one whose connection broke may be sent again.

gRPC's own retries and round robin are not used: its retries pause where another server could be called at once, and
stop at five attempts; its round robin needs one TLS name for all servers; and neither reports which server answered, or
after how many attempts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from edge.client.failures import EXHAUSTED, EXPIRED, UNAVAILABLE, FailedCall
from edge.errors import UsageError

#: Seconds that a server is out after its first failure, and at most.
FIRST_OUT_SECONDS: Final = 0.1
LONGEST_OUT_SECONDS: Final = 10.0
#: Missed deadlines in a row that take a server out: a board without power sends no error.
MISSES: Final = 3
_MAX_DOUBLINGS = 16  # avoids an overflow; the time has reached its maximum long before


@dataclass
class _Standing:
    failures: int = 0
    misses: int = 0
    out_until: float = 0.0
    lost: bool = False

    def is_in(self, now: float) -> bool:
        return not self.lost and now >= self.out_until


class Turn(NamedTuple):
    """Index of the next server, and whether it is in."""

    server: int
    is_in: bool


class RoundRobin:
    """Chooses the next of ``count`` servers, and skips failing ones. Thread-safe; times are of ``time.monotonic()``.

    A server is out when it cannot be reached, is not ready, or misses several deadlines in a row. It returns after a
    time that doubles with each failure in a row and, if its connection was lost, only once the connection is back.
    While all servers are out, the one that returns first is called.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._standings = [_Standing() for _ in range(count)]
        self._next = 0

    def turn(self, now: float, avoid: Collection[int] = ()) -> Turn:
        """Return the next server that is in; if none is, the one that returns first. ``avoid`` is a last resort."""
        with self._lock:
            order = [(self._next + step) % self.count for step in range(self.count)]
            order = [server for server in order if server not in avoid] or order
            ready = next((server for server in order if self._standings[server].is_in(now)), None)
            server = min(order, key=lambda index: self._standings[index].out_until) if ready is None else ready
            # Only first attempts advance the turn; a retry would send the next request to the server that just failed.
            if not avoid:
                self._next = (server + 1) % self.count
            return Turn(server, ready is not None)

    def answered(self, server: int) -> None:
        """Record an answer, which shows that the server works."""
        with self._lock:
            self._standings[server] = _Standing()

    def failed(self, server: int, failure: FailedCall, now: float) -> bool:
        """Record a failed call; return whether the server is out until :meth:`connected` because it was lost."""
        with self._lock:
            standing = self._standings[server]
            if failure.code == EXPIRED:
                standing.misses += 1
                if standing.misses < MISSES:
                    return False
            elif failure.code != UNAVAILABLE:  # the server works
                self._standings[server] = _Standing()
                return False
            # Concurrent requests that fail together count as one failure.
            if now >= standing.out_until:
                out_seconds = min(FIRST_OUT_SECONDS * 2**standing.failures, LONGEST_OUT_SECONDS)
                standing.out_until = now + out_seconds
                standing.failures = min(standing.failures + 1, _MAX_DOUBLINGS)
            standing.lost |= failure.code == UNAVAILABLE
            return standing.lost

    def connected(self, server: int) -> None:
        """Record that a connection is back, or that it is time to try it."""
        with self._lock:
            self._standings[server].lost = False


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Limits of the retries of one client.

    Attributes:
        attempts: maximum number of attempts of one call, the first one included; 1 disables retries.
        first_seconds: upper limit of the first pause, doubled with each retry. A pause is a random part of its limit
            (full jitter), so that clients that failed together do not return together.
        longest_seconds: upper limit of every pause, unless the server asks for a longer one.
        budget: number of retries that all calls of a client share.
        earned: retries that each call adds to the budget: the share by which a lasting overload grows at most.
    """

    attempts: int = 4
    first_seconds: float = 0.1
    longest_seconds: float = 2.0
    budget: float = 10.0
    earned: float = 0.1

    def __post_init__(self) -> None:
        """Check the values."""
        if self.attempts < 1:
            raise UsageError("attempts", given=self.attempts, expected="1 or more", fix="Give 1 for no retries.")
        for name in ("first_seconds", "longest_seconds", "budget", "earned"):
            value = getattr(self, name)
            if not value >= 0:  # so that NaN is refused too
                raise UsageError(name, given=value, expected="0 or more", fix="Leave it out for the default.")

    def pause(self, retry: int) -> float:
        """Return the seconds to wait before the retry of that number, the first being 0."""
        return random.uniform(0, min(self.first_seconds * 2 ** min(retry, 32), self.longest_seconds))


DEFAULT_RETRIES = Retries()
#: No retries, for measurements.
ONCE = Retries(attempts=1)


class Budget:
    """Token bucket of the retries of all calls of a client: a call adds a fraction, a retry takes one. Thread-safe."""

    def __init__(self, retries: Retries) -> None:
        self._lock = threading.Lock()
        self._most, self._earned = retries.budget, retries.earned
        self._left = retries.budget

    def earn(self) -> None:
        """Count a call."""
        with self._lock:
            self._left = min(self._left + self._earned, self._most)

    def spend(self) -> bool:
        """Take a retry from the bucket; False if it is empty."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


class Attempts:
    """Attempts of one call: the index of the ``server`` to call now, the ``count`` of attempts, and the time left.

    Args:
        timeout_seconds: time limit of all attempts and pauses together; None for no limit.
        server: index of the only server to call; None lets them take turns.
    """

    def __init__(
        self,
        round_robin: RoundRobin,
        retries: Retries,
        budget: Budget,
        *,
        repeatable: bool,
        timeout_seconds: float | None,
        server: int | None = None,
    ) -> None:
        now, self.count = time.monotonic(), 1
        self._round_robin, self._retries, self._budget = round_robin, retries, budget
        self._repeatable, self._only = repeatable, server
        self._deadline = None if timeout_seconds is None else now + timeout_seconds
        self._tried: set[int] = set()
        self._room_at: dict[int, float] = {}
        budget.earn()
        self._take(now)

    def start(self) -> float | None:
        """Start the current attempt; return the seconds until the deadline, at least 0, or None without one."""
        self._started_ns = time.perf_counter_ns()
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def answered(self) -> int:
        """Record an answer, and return the nanoseconds since the start of the attempt."""
        self._round_robin.answered(self.server)
        return time.perf_counter_ns() - self._started_ns

    def failed(self, failure: FailedCall) -> float | None:
        """Record a failed attempt, choose the next server, and return the pause in seconds; None if it was the last.

        A server that is in and has not been tried for this call is called at once, any other after a pause.
        """
        now = time.monotonic()
        if not self._repeatable or self.count >= self._retries.attempts:
            return None
        if failure.code == EXHAUSTED and failure.retry_after_ms:
            self._room_at[self.server] = now + failure.retry_after_ms / 1e3
        elif failure.code != UNAVAILABLE:
            return None
        was_in = self._is_in
        self._tried.add(self.server)
        self._take(now)
        fresh = self._is_in and self.server not in self._tried
        pause = 0.0
        if not fresh:
            pause = max(self._room_at.get(self.server, now) - now, 0.0) + self._retries.pause(self.count - 1)
        if self._deadline is not None and now + pause >= self._deadline:
            return None
        # Requests that a failing server had accepted move to another one at once, and take nothing from the budget.
        moves = fresh and was_in and failure.code == UNAVAILABLE
        if not moves and not self._budget.spend():
            return None
        self.count += 1
        return pause

    def _take(self, now: float) -> None:
        if self._only is not None:
            self.server, self._is_in = self._only, True
            return
        all_tried = len(self._tried) == self._round_robin.count
        self.server, self._is_in = self._round_robin.turn(now, {self.server} if all_tried else self._tried)
