"""Retries of failed calls, and the servers that they go to.

Only two kinds of failure are transient: UNAVAILABLE, where no answer came back, and RESOURCE_EXHAUSTED with a hint when
to try again. An inference changes nothing at the server, so one whose connection broke may be sent again.

gRPC's own `retryPolicy` and `round_robin` are not used. As measured with gRPC 1.81, while one of two servers is not
ready, every other call fails once the throttle is used up; a hint beyond the deadline is waited for, and the server's
refusal lost; RESOURCE_EXHAUSTED without a hint is repeated; several servers need one TLS name; and no answer says which
server sent it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from edge.client.failures import EXHAUSTED, EXPIRED, UNAVAILABLE, FailedCall
from edge.errors import UsageError

#: Seconds that a server is out after its first failure, and at most.
FIRST_OUT_SECONDS: Final = 0.1
LONGEST_OUT_SECONDS: Final = 5.0
#: Missed deadlines in a row that take a server out: a board without power sends no error.
MISSES: Final = 3
_MAX_DOUBLINGS = 32  # avoids an overflow; the time has reached its maximum long before


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
        return random.uniform(0, min(self.first_seconds * 2 ** min(retry, _MAX_DOUBLINGS), self.longest_seconds))


DEFAULT_RETRIES = Retries()
#: No retries, for measurements.
ONCE = Retries(attempts=1)


@dataclass
class _Standing:
    failures: int = 0
    misses: int = 0
    out_until: float = 0.0


class Servers:
    """Chooses the next of ``count`` servers, skips failing ones, and bounds the retries of all calls. Thread-safe.

    A server is out when it cannot be reached, is not ready, or misses several deadlines in a row, for a time that
    doubles with each failure in a row. While all servers are out, the one that returns first is called.
    """

    def __init__(self, count: int, retries: Retries) -> None:
        self.count, self.retries = count, retries
        self._lock = threading.Lock()
        self._standings = [_Standing() for _ in range(count)]
        self._next = 0
        self._budget = retries.budget

    def turn(self, avoid: Collection[int] = ()) -> tuple[int, bool]:
        """Return the next server, and whether it is in. Those to ``avoid``, for a retry, are the last resort."""
        with self._lock:
            order = [(self._next + step) % self.count for step in range(self.count)]
            order = [server for server in order if server not in avoid] or order
            waits = {server: max(self._standings[server].out_until - time.monotonic(), 0.0) for server in order}
            server = min(order, key=waits.__getitem__)
            # Only first attempts advance the turn; a retry would send the next request to the server that just failed.
            if not avoid:
                self._next = (server + 1) % self.count
            return server, not waits[server]

    @property
    def failing(self) -> bool:
        """Whether any server has been out and has not answered since."""
        return any(standing.failures for standing in self._standings)

    def answered(self, server: int) -> None:
        """Record an answer, or a refusal, which shows that the server works."""
        self._standings[server] = _Standing()

    def failed(self, server: int, failure: FailedCall) -> None:
        """Record a failed call."""
        with self._lock:
            now, standing = time.monotonic(), self._standings[server]
            if failure.code not in (UNAVAILABLE, EXPIRED):
                self.answered(server)
                return
            standing.misses += failure.code == EXPIRED
            # Concurrent requests that fail together count as one failure.
            if now >= standing.out_until and (failure.code == UNAVAILABLE or standing.misses >= MISSES):
                standing.out_until = now + min(FIRST_OUT_SECONDS * 2**standing.failures, LONGEST_OUT_SECONDS)
                standing.failures = min(standing.failures + 1, _MAX_DOUBLINGS)

    def earn(self) -> None:
        """Count a call, which adds a part of a retry to the budget."""
        with self._lock:
            self._budget = min(self._budget + self.retries.earned, self.retries.budget)

    def spend(self) -> bool:
        """Take a retry from the budget; False if it is empty."""
        with self._lock:
            self._budget -= (enough := self._budget >= 1)
            return enough


class Attempts:
    """Attempts of one call: the index of the ``server`` to call now, the ``count`` of attempts, and the time left.

    Args:
        timeout_seconds: time limit of all attempts and pauses together; None for no limit.
        only: index of the only server to call; None lets them take turns.
    """

    def __init__(self, servers: Servers, *, repeatable: bool, timeout_seconds: float | None, only: int | None) -> None:
        self.count, self._servers, self._repeatable, self._only = 1, servers, repeatable, only
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._tried: set[int] = set()
        servers.earn()
        self.server = servers.turn()[0] if only is None else only

    def start(self) -> float | None:
        """Start the current attempt; return the seconds until the deadline, at least 0, or None without one."""
        self._started_ns = time.perf_counter_ns()
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def answered(self) -> int:
        """Record an answer, and return the nanoseconds since the start of the attempt."""
        self._servers.answered(self.server)
        return time.perf_counter_ns() - self._started_ns

    def failed(self, failure: FailedCall) -> float | None:
        """Record a failed attempt, choose the next server, and return the pause in seconds; None if it was the last.

        A server that is in and has not been tried for this call is called at once, any other after a pause.
        """
        self._servers.failed(self.server, failure)
        retries = self._servers.retries
        transient = failure.code == UNAVAILABLE or (failure.code == EXHAUSTED and failure.retry_after_ms)
        if not (transient and self._repeatable) or self.count >= retries.attempts:
            return None
        self._tried.add(self.server)
        fresh, pause = False, 0.0
        if self._only is None:
            self.server, is_in = self._servers.turn(self._tried)
            fresh = is_in and self.server not in self._tried
        if not fresh:
            pause = failure.retry_after_ms / 1e3 + retries.pause(self.count - 1)
        if self._deadline is not None and time.monotonic() + pause >= self._deadline:
            return None
        # Requests that a failing server had accepted move to another one at once, and take nothing from the budget.
        if not (fresh and failure.code == UNAVAILABLE) and not self._servers.spend():
            return None
        self.count += 1
        return pause
