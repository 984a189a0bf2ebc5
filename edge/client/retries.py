"""When a call is sent again: which refusals may be tried once more, where, after how long, and how often in all.

Only two kinds of refusal say that nothing was computed for good: UNAVAILABLE, where no answer came back, and
RESOURCE_EXHAUSTED with a time after which there may be room. An inference changes nothing at the server, so one that
was cut off may be repeated. Bad input stays bad, and a deadline that passed has passed.

gRPC has retries and a round robin of its own, in its service config. They are not used: its retries obey another
trailer than the servers of this protocol send, wait where the next server could be asked at once, and end at five; its
round robin wants one TLS name for all servers; and neither tells which server answered, after how many attempts. What
gRPC repeats by itself, unseen, is only what never left this machine or was refused before it was read.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from edge.client.refusals import EXHAUSTED, UNAVAILABLE, Refusal
from edge.client.rotation import Rotation
from edge.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often, and after how long.

    Attributes:
        attempts: of one call at most, the first one included; 1 never sends anything again.
        first_seconds: the longest first pause; each further one may be twice as long. A pause is a random part of that
            (full jitter), so that clients that were refused together do not come back together.
        longest_seconds: the longest pause, unless the server asks for a longer one.
        budget: how many retries all calls of a client have together.
        earned: by how much a call refills the budget. So a lasting overload is made worse by this part, and no more.
    """

    attempts: int = 4
    first_seconds: float = 0.1
    longest_seconds: float = 2.0
    budget: float = 10.0
    earned: float = 0.1

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UsageError: one is out of range.
        """
        if self.attempts < 1:
            fix = "1 sends everything once."
            raise UsageError("attempts", given=self.attempts, expected="1 or more", fix=fix)
        for name in ("first_seconds", "longest_seconds", "budget", "earned"):
            value = getattr(self, name)
            if not value >= 0:  # so that NaN is refused too
                raise UsageError(name, given=value, expected="0 or more", fix="Leave it out for the default.")

    def pause(self, retry: int) -> float:
        """Return the seconds to wait before the retry of that number, the first being 0."""
        return random.uniform(0, min(self.first_seconds * 2 ** min(retry, 32), self.longest_seconds))


DEFAULT_RETRIES = Retries()
#: For measurements: what a server refuses is refused.
ONCE = Retries(attempts=1)


class Budget:
    """A bucket of retries: each call puts a part of one in, each retry takes a whole one. Safe to share."""

    def __init__(self, retries: Retries) -> None:
        self._lock = threading.Lock()
        self._most, self._earned = retries.budget, retries.earned
        self._left = retries.budget

    def earn(self) -> None:
        """Count a call."""
        with self._lock:
            self._left = min(self._left + self._earned, self._most)

    def spend(self) -> bool:
        """Take a retry, if there is one."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


class Attempts:
    """One call, from its first attempt to its last: whose turn it is, and how much time is left.

    Args:
        rotation: the servers.
        retries: how often.
        budget: of the client.
        repeatable: whether the call may be sent twice.
        timeout_seconds: for all attempts and pauses together; None has no end.
        server: the only one to ask; None takes them in turns.

    Attributes:
        server: to ask now.
        count: attempts until now, this one included.
    """

    def __init__(
        self,
        rotation: Rotation,
        retries: Retries,
        budget: Budget,
        *,
        repeatable: bool,
        timeout_seconds: float | None,
        server: int | None = None,
    ) -> None:
        now = time.monotonic()
        self.count = 1
        self._rotation, self._retries, self._budget = rotation, retries, budget
        self._repeatable = repeatable
        self._deadline = None if timeout_seconds is None else now + timeout_seconds
        self._only = server
        self._asked: set[int] = set()
        self._room_at: dict[int, float] = {}
        budget.earn()
        self._take(now)

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, 0 at least; None without one."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def answered(self) -> None:
        """Note that the server answered."""
        self._rotation.answered(self.server)

    def refused(self, refusal: Refusal) -> float | None:
        """Choose the next server.

        One that has not been asked yet, and is in, is asked at once; another one after a pause.

        Returns:
            Seconds to wait before the next attempt; None where there shall be none.
        """
        now = time.monotonic()
        if not self._repeatable or self.count >= self._retries.attempts:
            return None
        if refusal.code == EXHAUSTED and refusal.retry_after_ms:
            self._room_at[self.server] = now + refusal.retry_after_ms / 1e3
        elif refusal.code != UNAVAILABLE:
            return None
        was_in = self._is_in
        self._asked.add(self.server)
        self._take(now)
        fresh = self._is_in and self.server not in self._asked
        pause = 0.0
        if not fresh:
            pause = max(self._room_at.get(self.server, now) - now, 0.0) + self._retries.pause(self.count - 1)
        if self._deadline is not None and now + pause >= self._deadline:
            return None
        # Requests that were on their way to a server when it went move on at once, and need no budget.
        moves = fresh and was_in and refusal.code == UNAVAILABLE
        if not moves and not self._budget.spend():
            return None
        self.count += 1
        return pause

    def _take(self, now: float) -> None:
        if self._only is not None:
            self.server, self._is_in = self._only, True
            return
        all_asked = len(self._asked) == self._rotation.count
        self.server, self._is_in = self._rotation.turn(now, {self.server} if all_asked else self._asked)
