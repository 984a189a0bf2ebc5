"""Rate limit of each client: exact to the request, bounded in memory."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import Mock

import pytest

from edge.errors import Overloaded, UsageError
from edge.security.rate import MAX_BUCKETS, Rate, RateLimit, client_of, parse_rate


@pytest.fixture
def clock() -> Mock:
    """A clock that tests move by hand: its return value is the time."""
    return Mock(return_value=100.0)


def allowed(limit: RateLimit, caller: str, requests: int = 100) -> int:
    refused = limit.refused
    for _ in range(requests):
        with suppress(Overloaded):
            limit.take(caller)
    return requests - (limit.refused - refused)


def test_option_gives_rate_and_burst() -> None:
    rates = [Rate(0.5, 1), Rate(2.5, 3), Rate(1e6, 1), Rate(1, 10**6)]
    assert [parse_rate(text) for text in ("0.5", "2.5", "1e6:1", "1:1000000")] == rates


def test_first_requests_are_allowed_at_any_time(clock: Mock) -> None:
    for clock.return_value in (seconds / 7 for seconds in range(1, 10_000)):
        assert allowed(RateLimit(Rate(0.01, 1), clock=clock), "a", 1) == 1


FORM = "REQUESTS_PER_SECOND or REQUESTS_PER_SECOND:BURST. For example 50:10."
RANGE = "more than 0 and at most 1e+06 requests per second, and a burst of 1 to 1e+06. Leave it out for no limit."


def test_invalid_option_is_rejected() -> None:
    for text, expected in (
        *((text, f"{text!r}, expected {FORM}") for text in ("x", "1:", "1:2.5", "nan")),
        *((text, f"{text}, expected {RANGE}") for text in ("0:1", "nan:1", "1.00001e+06:1", "1:0", "1:1000001")),
    ):
        with pytest.raises(UsageError) as caught:
            parse_rate(text)
        assert str(caught.value) == f"--rate-limit: got {expected}"


def test_client_gets_its_burst_and_then_the_rate(clock: Mock) -> None:
    limit = RateLimit(Rate(4, 6), clock=clock)
    assert [allowed(limit, caller) for caller in ("a", "b", "", "a")] == [6, 6, 6, 0]
    for seconds, more in ((0.24, 0), (0.02, 1), (0.5, 2), (60, 6)):
        clock.return_value += seconds
        assert allowed(limit, "a") == more
    assert limit.refused == 8 * 100 - 27


def test_refusal_says_when_there_is_room(clock: Mock) -> None:
    limit = RateLimit(Rate(4, 2), clock=clock)
    for _ in range(2):
        limit.take("a")
    clock.return_value += 0.125
    with pytest.raises(Overloaded) as caught:
        limit.take("a")
    assert str(caught.value) == (
        "requests of this client: got more than 4 per second after a burst of 2, expected no more than that. "
        "Send it again in 125 ms."
    )
    assert (caught.value.retry_after_ms, caught.value.cause) == (125, "rate")
    clock.return_value += 0.125
    limit.take("a")


def test_changing_addresses_does_not_evade_the_limit(clock: Mock) -> None:
    limit = RateLimit(Rate(1, 2), clock=clock, max_buckets=10)
    assert sum(allowed(limit, f"address {i}", 3) for i in range(100)) == 10 * 2 + 2  # the others share one bucket
    clock.return_value += 1.5
    assert allowed(limit, "address 0") == 1  # its bucket was kept
    clock.return_value += 0.5
    assert allowed(limit, "new 0") == 2  # replaces address 1, whose bucket is full
    assert [allowed(limit, f"address {i}") for i in (0, 1)] == [1, 2]
    assert MAX_BUCKETS == 1024


def test_ipv6_clients_are_networks() -> None:
    addresses = ("127.0.0.1", "::ffff:10.0.0.1", "2001:db8:1:2:3:4:5:6", "fe80::1%eth0", "x:y")
    clients = ["127.0.0.1", "10.0.0.1", "2001:db8:1:2::/64", "fe80::/64", "x:y"]
    assert [client_of(address) for address in addresses] == clients
