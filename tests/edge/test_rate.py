"""How often a client may ask: exact to the request, bounded in memory, and no way around it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from edge.errors import Overloaded, UsageError
from edge.security.rate import Rate, RateLimit, client_of, parse_rate


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def taken(limit: RateLimit, caller: str, tries: int = 100) -> int:
    """How many of some requests at once are let through."""
    refused = limit.refused
    for _ in range(tries):
        with suppress(Overloaded):
            limit.take(caller)
    return tries - (limit.refused - refused)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10", Rate(10, 10)),
        ("10:3", Rate(10, 3)),
        ("0.5", Rate(0.5, 1)),
        ("2.5", Rate(2.5, 3)),
        ("1e6:1", Rate(1e6, 1)),
    ],
)
def test_what_an_option_says(text: str, rate: Rate) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "nan", "inf", "1e7", "1:", "1:0", "1:-1", "1:2.5", "1:2:3", "1:9999999"]
)
def test_what_an_option_may_not_say(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rate(text)
    assert caught.value.subject == "--rate-limit"


def test_a_burst_and_then_the_rate(clock: Clock) -> None:
    limit = RateLimit(Rate(4, 6), clock=clock)
    assert taken(limit, "a") == 6
    for seconds, more in ((0.24, 0), (0.02, 1), (0.5, 2), (60, 6)):
        clock.now += seconds
        assert taken(limit, "a") == more
    assert limit.refused == 5 * 100 - 15


def test_clients_do_not_disturb_each_other(clock: Clock) -> None:
    limit = RateLimit(Rate(1, 2), clock=clock)
    assert [taken(limit, caller) for caller in ("a", "b", "", "a")] == [2, 2, 2, 0]


def test_when_there_is_room_again(clock: Clock) -> None:
    limit = RateLimit(Rate(4, 1), clock=clock)
    limit.take("a")
    with pytest.raises(Overloaded, match="Send it again in 250 ms") as caught:
        limit.take("a")
    assert (caught.value.retry_after_ms, caught.value.cause) == (250, "rate")
    clock.now += 0.25
    limit.take("a")


def test_changing_ones_address_gains_nothing(clock: Clock) -> None:
    limit = RateLimit(Rate(1, 2), clock=clock, max_buckets=10)
    assert sum(taken(limit, f"address {i}", 3) for i in range(100)) == 10 * 2 + 2  # the others share one bucket
    clock.now += 1.5
    assert taken(limit, "address 0") == 1  # nobody's debt was forgotten
    clock.now += 2
    assert taken(limit, "a newcomer") == 2  # in the place of one that owed nothing


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("x:y", "x:y"),
    ],
)
def test_whom_an_address_stands_for(address: str, client: str) -> None:
    assert client_of(address) == client
