"""What is sent again and what is not, against servers that refuse on purpose; and who is asked next."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from edge.client import ONCE, Client, Retries
from edge.client.refusals import Refusal
from edge.client.retries import Budget
from edge.client.round_robin import FIRST_OUT, LONGEST_OUT, MISSES, RoundRobin
from edge.errors import ServerError, ServerRefused, UsageError
from tests.support.metrics import wait_until
from tests.support.scripted_servers import doubled, peer, refusing, x

QUICK = Retries(first_seconds=0.01)
#: Statuses of calls that the server refused; the others are failures.
REFUSED = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
}
LOST, LATE = Refusal("UNAVAILABLE", "gone"), Refusal("DEADLINE_EXCEEDED", "late")
EXHAUSTED, UNAVAILABLE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def closed_port() -> Iterator[str]:
    """Bound and not listening: refused, and nobody else can take it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


# One server


@pytest.mark.parametrize(
    "code",
    [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, UNAVAILABLE)],
    ids=lambda code: code.name,
)
def test_what_no_second_attempt_would_mend_is_sent_once(code: grpc.StatusCode) -> None:
    with peer(refusing(code)) as one, Client(one.url, retries=QUICK) as client:
        with pytest.raises(ServerError) as caught:
            client.infer("m", x())
        assert len(one.asked) == 1
    error = caught.value
    assert (error.code, error.server, error.attempts, error.retry_after_ms) == (code.name, one.url, 1, 0)
    told = f"model 'm' at {one.url}: got {code.name}"
    if code.name in REFUSED:
        assert str(error).startswith(f"{told}, expected an answer. The server says: as the test says.")
        assert (type(error), error.exit_code) == (ServerRefused, 7)
    else:
        assert str(error).startswith(f"{told} (as the test says), expected an answer. ")
        assert (type(error), error.exit_code) == (ServerError, 6)


def test_unavailable_is_sent_again() -> None:
    with peer(refusing(UNAVAILABLE, times=2)) as one, Client(one.url, retries=QUICK) as client:
        result = client.infer("m", x(3))
    assert (result.outputs["y"], result.call.attempts, len(one.asked)) == (6, 3, 3)


def test_the_time_that_a_full_server_asks_for_is_waited() -> None:
    with peer(refusing(EXHAUSTED, after_ms=80, times=2)) as one, Client(one.url, retries=QUICK) as client:
        begun = time.monotonic()
        assert client.infer("m", x()).call.attempts == 3
        assert time.monotonic() - begun >= 0.16


@pytest.mark.parametrize("after", ["", "soon", "-1", "1.5", "9" * 30, "0"])
def test_a_time_that_is_none_is_no_invitation(after: str) -> None:
    with peer(refusing(EXHAUSTED, after_ms=after)) as one, Client(one.url, retries=QUICK) as client:
        with pytest.raises(ServerError, match="RESOURCE_EXHAUSTED"):
            client.infer("m", x())
        assert len(one.asked) == 1


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    with peer(refusing(EXHAUSTED, after_ms=5000)) as one, Client(one.url, 4.0) as client:
        begun = time.monotonic()
        with pytest.raises(ServerError) as caught:
            client.infer("m", x())
        assert time.monotonic() - begun < 3
        assert (caught.value.retry_after_ms, len(one.asked)) == (5000, 1)


def test_all_attempts_together_keep_the_deadline() -> None:
    """Each attempt takes 0.1 s and fails; the last is cut off by what is left of 0.8 s."""

    def slow(request: object, context: grpc.ServicerContext) -> None:
        time.sleep(0.1)
        context.abort(UNAVAILABLE, "slowly")

    retries = Retries(attempts=100, first_seconds=0.001, longest_seconds=0.001, budget=100)
    with peer(slow) as one, Client(one.url, 10.0, retries=retries) as client:  # type: ignore[arg-type]
        begun = time.monotonic()
        with pytest.raises(ServerError) as caught:
            client.infer("m", x(), timeout_seconds=0.8)
        assert 0.7 < time.monotonic() - begun < 1.2
    assert 2 <= caught.value.attempts <= 8


def test_a_silent_server_costs_the_deadline_and_no_more() -> None:
    with socket.socket() as silent:  # takes the connection and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with Client(f"127.0.0.1:{silent.getsockname()[1]}") as client:
            begun = time.monotonic()
            with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
                client.infer("m", x(), timeout_seconds=0.2)
            assert 0.15 < time.monotonic() - begun < 0.8


def test_retries_do_not_multiply_an_overload() -> None:
    retries = Retries(attempts=10, first_seconds=0.0, budget=5, earned=0.1)
    with peer(refusing(EXHAUSTED, after_ms=1)) as one, Client(one.url, retries=retries) as client:
        for _ in range(50):
            with pytest.raises(ServerError):
                client.infer("m", x())
        assert 50 + 5 <= len(one.asked) <= 50 + 5 + 5


def test_once_is_once(closed_port: str) -> None:
    with peer(refusing(UNAVAILABLE)) as one, Client([closed_port, one.url], retries=ONCE) as client:
        for _ in range(2):
            with pytest.raises(ServerError) as caught:
                client.infer("m", x())
            assert caught.value.attempts == 1
        assert len(one.asked) == 1


def test_changes_and_streams_are_sent_once() -> None:
    with peer(refusing(UNAVAILABLE)) as one, Client(one.url, retries=QUICK) as client:
        with pytest.raises(ServerError):
            client.load("m")
        assert len(one.asked) == 1
        assert not client.ready()
        assert len(one.asked) == 2


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"budget": -1}, {"first_seconds": float("nan")}])
def test_wrong_retries(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Retries(**wrong)  # type: ignore[arg-type]


# Several servers


def test_servers_take_turns() -> None:
    with peer() as one, peer() as other, Client([one.url, other.url]) as client:
        servers = Counter(client.infer("m", x(number)).call.server for number in range(10))
    assert servers == {one.url: 5, other.url: 5}


def test_one_server_can_be_named() -> None:
    with peer() as one, peer() as other, Client([one.url, other.url]) as client:
        assert {client.infer("m", x(), server=other.url).call.server for _ in range(5)} == {other.url}
        assert not one.asked
        with pytest.raises(UsageError, match="server: got 'elsewhere'"):
            client.infer("m", x(), server="elsewhere")
        with pytest.raises(UsageError, match="server for model 'm': got 2 servers, expected one of them"):
            client.load("m")


def test_a_server_that_is_down_costs_one_attempt(closed_port: str) -> None:
    with peer() as one, Client([closed_port, one.url]) as client:
        attempts = [client.infer("m", x()).call.attempts for _ in range(6)]
    assert attempts == [2, 1, 1, 1, 1, 1]


def test_a_full_server_passes_its_requests_on_at_once() -> None:
    with peer(refusing(EXHAUSTED, after_ms=60_000)) as full, peer() as free, Client([full.url, free.url]) as client:
        trips = [client.infer("m", x()).call for _ in range(4)]
    assert {trip.server for trip in trips} == {free.url}
    assert len(full.asked) == 2  # it may have room for the next one, so it is asked again


def test_all_servers_are_asked_before_one_is_asked_again() -> None:
    with peer(refusing(UNAVAILABLE)) as a, peer(refusing(UNAVAILABLE)) as b, peer(refusing(UNAVAILABLE)) as c:
        with Client([a.url, b.url, c.url], retries=QUICK) as client, pytest.raises(ServerError, match="in 4 attempts"):
            client.infer("m", x())
        assert sorted(len(one.asked) for one in (a, b, c)) == [1, 1, 2]


def test_no_request_is_lost_when_a_server_goes_and_it_is_asked_again_when_it_is_back() -> None:
    def slow(request: object, context: grpc.ServicerContext) -> object:
        time.sleep(0.02)
        return doubled(request, context)  # type: ignore[arg-type]

    with peer() as stays:
        with peer(slow) as goes:  # type: ignore[arg-type]
            client = Client([stays.url, goes.url])
            assert {client.infer("m", x()).call.server for _ in range(2)} == {stays.url, goes.url}
        with client:
            for number in range(50):
                assert client.infer("m", x(number)).outputs["y"] == 2 * number
            assert client.infer("m", x()).call.attempts == 1
            with peer(port=int(goes.url.split(":")[1])):
                servers = (client.infer("m", x(), timeout_seconds=1).call.server for _ in iter(time.time, None))
                assert wait_until(lambda: goes.url in [next(servers), next(servers)])
                assert {client.infer("m", x()).call.server for _ in range(2)} == {stays.url, goes.url}


@pytest.mark.parametrize("urls", [[], [""], ["a:1", "a:1"]])
def test_servers_that_are_none(urls: list[str]) -> None:
    with pytest.raises(UsageError, match="expected one server, or different ones"):
        Client(urls)


# Who is in


def test_a_failure_puts_a_server_out_for_longer_each_time() -> None:
    round_robin = RoundRobin(2)
    now, outs = 0.0, []
    for _ in range(12):
        assert round_robin.refused(0, LOST, now)
        round_robin.connected(0)
        lasted = next(step for step in np.arange(0.05, 20, 0.05) if round_robin.are_in(now + step + 1e-9)[0])
        outs.append(float(lasted))
        now += lasted + 1e-6
    assert outs[0] == pytest.approx(FIRST_OUT)
    assert outs[1] == pytest.approx(2 * FIRST_OUT)
    assert outs[-1] == pytest.approx(LONGEST_OUT)
    round_robin.answered(0)
    assert round_robin.are_in(now) == [True, True]


def test_many_requests_that_fail_together_are_one_failure() -> None:
    round_robin = RoundRobin(1)
    for _ in range(100):
        round_robin.refused(0, LOST, 5.0)
    round_robin.connected(0)
    assert round_robin.are_in(5.0 + FIRST_OUT + 1e-9) == [True]


def test_a_lost_connection_is_waited_for() -> None:
    round_robin = RoundRobin(2)
    round_robin.refused(0, LOST, 0.0)
    assert round_robin.are_in(LONGEST_OUT) == [False, True]
    round_robin.connected(0)
    assert round_robin.are_in(FIRST_OUT / 2) == [False, True]
    assert round_robin.are_in(FIRST_OUT + 1e-9) == [True, True]


def test_late_answers_in_a_row_put_a_server_out() -> None:
    round_robin = RoundRobin(2)
    for _ in range(MISSES - 1):
        assert not round_robin.refused(0, LATE, 0.0)
    round_robin.answered(0)
    for miss in range(MISSES):
        assert round_robin.are_in(0.0)[0], miss
        round_robin.refused(0, LATE, 0.0)
    assert round_robin.are_in(0.0) == [False, True]
    assert round_robin.are_in(FIRST_OUT + 1e-9) == [True, True]  # its connection was never lost


def test_the_servers_that_are_left_share_the_load() -> None:
    round_robin = RoundRobin(3)
    round_robin.refused(1, LOST, 0.0)
    turns = [round_robin.turn(0.0) for _ in range(100)]
    assert all(turn.is_in for turn in turns)
    assert Counter(turn.server for turn in turns) == {0: 50, 2: 50}


def test_where_all_are_out_the_first_to_come_back_is_asked() -> None:
    round_robin = RoundRobin(2)
    round_robin.refused(0, LOST, 0.0)
    round_robin.refused(1, LOST, 0.05)
    assert round_robin.turn(0.06) == (0, False)
    assert round_robin.turn(0.06, avoid={0}) == (1, False)


def test_a_budget_is_earned() -> None:
    budget = Budget(Retries(budget=1, earned=0.25))
    assert [budget.spend(), budget.spend()] == [True, False]
    for _ in range(3):
        budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]  # no more than its size is kept


def test_pauses_are_random_and_bounded() -> None:
    retries = Retries(first_seconds=0.1, longest_seconds=1.0)
    for retry, most in ((0, 0.1), (1, 0.2), (2, 0.4), (10, 1.0), (10**6, 1.0)):
        pauses = [retries.pause(retry) for _ in range(200)]
        assert all(0 <= pause <= most for pause in pauses)
        assert max(pauses) > 0.7 * most
        assert min(pauses) < 0.3 * most
