"""Rate limit for each client: token buckets, bounded in number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address

from edge.errors import Overloaded, Raw, UsageError

#: Further clients share one bucket, until another client's bucket is full and so need not be kept.
MAX_BUCKETS = 1024
_MAX_RATE = 1e6


@dataclass(frozen=True)
class Rate:
    """Limit of the requests of one client: a long-term rate, and a burst after a pause."""

    per_second: float
    burst: int

    def __post_init__(self) -> None:
        if not 0 < self.per_second <= _MAX_RATE or not 1 <= self.burst <= _MAX_RATE:
            given = Raw(f"{self.per_second:g}:{self.burst}")
            expected = f"more than 0 and at most {_MAX_RATE:g} requests per second, and a burst of 1 to {_MAX_RATE:g}"
            raise UsageError("--rate-limit", given=given, expected=expected, fix="Leave it out for no limit.")


def parse_rate(text: str) -> Rate:
    """Read ``REQUESTS_PER_SECOND[:BURST]``; the default burst is one second's requests."""
    first, colon, second = text.partition(":")
    try:
        per_second = float(first)
        burst = int(second) if colon else max(1, math.ceil(min(per_second, _MAX_RATE)))
    except ValueError:
        expected = "REQUESTS_PER_SECOND or REQUESTS_PER_SECOND:BURST"
        raise UsageError("--rate-limit", given=text, expected=expected, fix="For example 50:10.") from None
    return Rate(per_second, burst)


def client_of(address: str) -> str:
    """Return the client behind an IP address: in IPv6 its /64 network, all of which one client may use."""
    try:
        network = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(network.ipv4_mapped or f"{IPv6Address(int(network) >> 64 << 64)}/64")


class RateLimit:
    """A token bucket for each of ``max_buckets`` clients; further clients share one. Only the event loop uses it."""

    def __init__(
        self, rate: Rate, *, clock: Callable[[], float] = time.monotonic, max_buckets: int = MAX_BUCKETS
    ) -> None:
        self.refused = 0
        self._rate, self._clock, self._max_buckets = rate, clock, max_buckets
        # When each bucket is full again, in requests: seconds times the rate. The least recently used comes first, and
        # None is the shared bucket.
        self._full_at: dict[str | None, float] = {}

    def take(self, caller: str, *, refuse: bool = True) -> None:
        """Count one request of a client, or raise Overloaded with the time until there is room.

        Without ``refuse``, one for which there is no room counts, too, and the next ones have to wait for it.
        """
        now = self._clock() * self._rate.per_second
        key: str | None = caller
        if caller not in self._full_at and len(self._full_at) >= self._max_buckets:
            oldest = next(iter(self._full_at))
            if self._full_at[oldest] <= now:
                del self._full_at[oldest]
            else:
                key = None  # a new bucket would be full, so that changing addresses would evade the limit
        full_at = max(self._full_at.pop(key, now), now)
        excess = full_at - now + 1 - self._rate.burst  # in this order the first request of a client is exactly 0
        taken = excess <= 0 or not refuse
        self._full_at[key] = full_at + taken
        if taken:
            return
        self.refused += 1
        wait_ms = math.ceil(excess / self._rate.per_second * 1000)
        raise Overloaded(
            "requests of this client",
            given=Raw(f"more than {self._rate.per_second:g} per second after a burst of {self._rate.burst}"),
            expected="no more than that",
            fix=f"Send it again in {wait_ms} ms.",
            cause="rate",
            retry_after_ms=wait_ms,
        )
