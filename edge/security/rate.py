"""Rate limit for each client: token buckets, bounded in number."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from edge.errors import Literally, Overloaded, UsageError

#: Clients whose buckets are kept apart; further ones share one until a bucket is full again, which says nothing more.
MAX_BUCKETS = 1024
_MAX_RATE = 1e6


@dataclass(frozen=True)
class Rate:
    """How often a client may ask.

    Attributes:
        per_second: requests per second in the long run.
        burst: how many at once after a pause.
    """

    per_second: float
    burst: int

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            UsageError: one is out of range.
        """
        if not 0 < self.per_second <= _MAX_RATE or not 1 <= self.burst <= _MAX_RATE:
            given = Literally(f"{self.per_second:g}:{self.burst}")
            expected = f"more than 0 and at most {_MAX_RATE:g} requests per second, and a burst of 1 to {_MAX_RATE:g}"
            raise UsageError("--rate-limit", given=given, expected=expected, fix="Leave it out for no limit.")


def parse_rate(text: str) -> Rate:
    """Read ``REQUESTS_PER_SECOND[:BURST]``; without a burst it is a second's worth.

    Raises:
        UsageError: it is none.
    """
    first, colon, second = text.partition(":")
    try:
        per_second = float(first)
        burst = int(second) if colon else max(1, math.ceil(min(per_second, _MAX_RATE)))
    except ValueError:
        expected = "REQUESTS_PER_SECOND or REQUESTS_PER_SECOND:BURST"
        raise UsageError("--rate-limit", given=text, expected=expected, fix="Say for instance 50:10.") from None
    return Rate(per_second, burst)


def client_of(address: str) -> str:
    """Return whom an IP address stands for: itself, or its network of 64 bits, which one client has whole in IPv6."""
    if ":" not in address:
        return address
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    return str(found.ipv4_mapped or f"{IPv6Address(int(found) >> 64 << 64)}/64")


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled: float


class RateLimit:
    """Counts each client's requests. Used by the event loop alone.

    Args:
        rate: what a client may ask.
        clock: seconds that never go back.
        max_buckets: how many clients are kept apart.

    Attributes:
        refused: how many requests were too many.
    """

    def __init__(
        self, rate: Rate, *, clock: Callable[[], float] = time.monotonic, max_buckets: int = MAX_BUCKETS
    ) -> None:
        self.refused = 0
        self._rate = rate
        self._clock = clock
        self._max_buckets = max_buckets
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._shared = _Bucket(float(rate.burst), clock())

    def take(self, caller: str) -> None:
        """Count one request.

        Args:
            caller: whose; the empty name is a client like any other.

        Raises:
            Overloaded: it is one too many, and ``retry_after_ms`` tells when there is room.
        """
        now = self._clock()
        bucket = self._bucket(caller, now)
        self._fill(bucket, now)
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return
        self.refused += 1
        wait_ms = math.ceil((1 - bucket.tokens) / self._rate.per_second * 1000)
        raise Overloaded(
            "requests of this client",
            given=Literally(f"more than {self._rate.per_second:g} per second after {self._rate.burst} at once"),
            expected="no more than that",
            fix=f"Send it again in {wait_ms} ms.",
            cause="rate",
            retry_after_ms=wait_ms,
        )

    def _bucket(self, caller: str, now: float) -> _Bucket:
        bucket = self._buckets.get(caller)
        if bucket is not None:
            self._buckets.move_to_end(caller)
            return bucket
        if len(self._buckets) >= self._max_buckets:
            oldest = next(iter(self._buckets))
            self._fill(self._buckets[oldest], now)
            if self._buckets[oldest].tokens < self._rate.burst:
                return self._shared  # else who changes addresses would be given a full bucket each time
            del self._buckets[oldest]
        return self._buckets.setdefault(caller, _Bucket(float(self._rate.burst), now))

    def _fill(self, bucket: _Bucket, now: float) -> None:
        bucket.tokens = min(self._rate.burst, bucket.tokens + (now - bucket.filled) * self._rate.per_second)
        bucket.filled = now
