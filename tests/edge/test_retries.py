"""Retries of failed calls, against servers that fail on purpose."""

import time
from collections import Counter
from types import SimpleNamespace

import grpc
import pytest

from edge.client import ONCE, Client, Retries
from edge.client.failures import FailedCall
from edge.client.retries import FIRST_OUT_SECONDS, LONGEST_OUT_SECONDS, MISSES, Attempts, Servers
from edge.errors import ServerError, ServerRefused, UsageError
from tests.support.clients import CLIENTS
from tests.support.metrics import wait_until
from tests.support.scripted_servers import closed_port, doubled, peer, refusing, x

QUICK = Retries(first_seconds=0.01)
MANY = Retries(attempts=100, first_seconds=0.001, longest_seconds=0.001, budget=100)
#: Statuses of calls that the server rejected; the others are failures.
REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}
REFUSED |= {"FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED", "UNAUTHENTICATED"}
LOST, LATE, BAD = (FailedCall(code, "") for code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"))
EXHAUSTED, UNAVAILABLE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


def fails(client, **options):
    with pytest.raises(ServerError) as caught:
        client.infer("m", x(), **options)
    return caught.value


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, and pauses without chance."""
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    return clock


def is_in(servers, server):
    return servers.turn(avoid=set(range(servers.count)) - {server}) == (server, True)


def test_failing_server_is_out_for_longer_each_time(clock):
    servers = Servers(2, QUICK)
    for failure in range(1100):  # beyond what a float holds
        begun, out_seconds = clock.now, min(FIRST_OUT_SECONDS * 2 ** min(failure, 99), LONGEST_OUT_SECONDS)
        for _ in range(2):  # concurrent failures count once
            servers.failed(0, LOST)
        for share, back in ((0.99, False), (1.01, True)):
            clock.now = begun + out_seconds * share
            assert (is_in(servers, 0), is_in(servers, 1)) == (back, True)
    servers.answered(0)
    servers.failed(0, LOST)
    clock.now += FIRST_OUT_SECONDS
    assert is_in(servers, 0)
    assert (FIRST_OUT_SECONDS, LONGEST_OUT_SECONDS, MISSES) == (0.1, 5.0, 3)


def test_several_missed_deadlines_in_a_row_take_a_server_out(clock):
    servers = Servers(1, QUICK)
    for answered in (lambda: servers.answered(0), lambda: servers.failed(0, BAD)):
        for _ in range(MISSES - 1):
            servers.failed(0, LATE)
        answered()
    for _ in range(MISSES):
        assert is_in(servers, 0)
        servers.failed(0, LATE)
    assert not is_in(servers, 0)
    clock.now += FIRST_OUT_SECONDS
    assert is_in(servers, 0)


def test_servers_that_are_in_take_turns(clock):
    servers = Servers(3, QUICK)
    assert [servers.turn()[0] for _ in range(4)] == [0, 1, 2, 0]
    servers.failed(1, LOST)
    assert servers.turn(avoid={0}) == (2, True)  # a retry does not advance the turn
    assert [servers.turn() for _ in range(3)] == [(2, True), (0, True), (2, True)]
    clock.now += 0.01
    servers.failed(2, LOST)
    clock.now += 0.01
    servers.failed(0, LOST)
    assert servers.turn() == (1, False)  # the first to return
    assert (servers.turn(avoid={1}), servers.turn(avoid={0, 1, 2})) == ((2, False), (1, False))


def test_budget_bounds_retries():
    servers = Servers(1, Retries(budget=1, earned=0.25))
    for earned in (0, 4, 100):
        for _ in range(earned):
            assert not (earned == 4 and servers.spend())
            servers.earn()
        assert [servers.spend(), servers.spend()] == [True, False]


def test_retries_out_of_range_are_rejected():
    Retries(attempts=1, first_seconds=0, longest_seconds=0, budget=0, earned=0)
    wrong = (
        ("attempts", 0, "1 or more. Give 1 for no retries."),
        *((name, -1, "0 or more. Leave it out for the default.") for name in ("budget", "longest_seconds", "earned")),
        ("first_seconds", float("nan"), "0 or more. Leave it out for the default."),
    )
    for name, value, expected in wrong:
        with pytest.raises(UsageError, match=f"^{name}: got {value}, expected {expected}$"):
            Retries(**{name: value})


def test_attempts_move_to_servers_with_room(clock):
    full, retries = FailedCall("RESOURCE_EXHAUSTED", "", 500), Retries(budget=2, earned=0)

    def attempts(count, servers=None, **options):
        options = {"repeatable": True, "timeout_seconds": 5.0, "only": None, **options}
        return Attempts(servers or Servers(count, retries), **options)

    shared = Servers(2, retries)
    both = attempts(2, shared)
    assert (both.start(), both.server, both.count) == (5.0, 0, 1)
    assert (both.failed(full), both.server, both.count) == (0.0, 1, 2)
    assert (both.failed(full), both.server, both.count) == (0.5 + 0.2, 1, 3)
    assert both.failed(full) is None  # the budget is empty
    assert (attempts(2, shared).failed(LOST), attempts(2, shared, only=1).failed(LOST)) == (0.0, None)  # moving is free
    three = attempts(3)
    assert [(three.failed(LOST), three.server) for _ in range(3)] == [(0.0, 1), (0.0, 2), (0.4, 1)]
    assert three.failed(LOST) is None  # after four attempts
    assert attempts(1, timeout_seconds=0.6).failed(full) is None  # 0.5 + 0.1 s is the deadline
    assert attempts(1, timeout_seconds=0.61).failed(full) == 0.6
    assert attempts(1, timeout_seconds=None).start() is None
    servers = Servers(2, Retries(budget=1, earned=0.5))
    servers.failed(1, LOST)
    call = attempts(2, servers)
    assert (call.failed(LOST), call.server, servers.spend()) == (0.1, 1, False)  # neither is in
    call.start()
    call.answered()
    assert is_in(servers, 1)
    attempts(2, servers)
    attempts(2, servers)
    assert servers.spend()  # each call has earned a half
    clock.now = 56.0
    assert both.start() == 0.0
    assert 0 < both.answered() < 60e9
    clock.now = 50.0
    assert attempts(2, only=1).failed(LOST) == 0.1
    for failure, options in ((BAD, {}), (FailedCall("RESOURCE_EXHAUSTED", ""), {}), (LOST, {"repeatable": False})):
        assert attempts(2, **options).failed(failure) is None


def test_pauses_are_random_and_bounded(monkeypatch):
    for retry, longest in ((0, 0.1), (1, 0.2), (2, 0.4), (10, 2.0), (10**6, 2.0)):
        pauses = [Retries().pause(retry) for _ in range(200)]
        assert 0 <= min(pauses) < 0.3 * longest
        assert 0.7 * longest < max(pauses) <= longest
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    assert Retries(first_seconds=1e-9, longest_seconds=100).pause(40) == pytest.approx(1e-9 * 2**32)


PERMANENT = [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, UNAVAILABLE)]


@pytest.mark.parametrize("code", PERMANENT, ids=lambda code: code.name)
def test_permanent_failure_is_not_repeated(code):
    with peer(refusing(code)) as one, Client(one.url, retries=QUICK) as client:
        error = fails(client)
        assert len(one.requests) == 1
    assert (error.code, error.server, error.attempts, error.retry_after_ms) == (code.name, one.url, 1, 0)
    rest, kind, exit_code = " (as the test says), expected an answer. ", ServerError, 6
    if code.name in REFUSED:
        rest, kind, exit_code = ", expected an answer. The server says: as the test says.", ServerRefused, 7
    assert str(error).startswith(f"model 'm' at {one.url}: got {code.name}{rest}")
    assert (type(error), error.exit_code) == (kind, exit_code)


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_transient_failure_is_repeated(make):
    with peer(refusing(UNAVAILABLE, times=2)) as one, make(one.url, retries=QUICK) as client:
        result = client.infer("m", x(3))
        assert (result.outputs["y"], result.call.attempts, len(one.requests)) == (6, 3, 3)
        one.behave = refusing(EXHAUSTED, after_ms=80, times=2)
        begun = time.monotonic()
        assert client.infer("m", x()).call.attempts == 3
        assert time.monotonic() - begun >= 0.16


class Error(grpc.RpcError):
    def __init__(self, code, details, after=""):
        self.code, self.details = (lambda: code), (lambda: details)
        self.trailing_metadata = lambda: (("retry-after-ms", after),)


def test_status_and_hint_are_read_from_the_error():
    for after in ("", "soon", "-1", "1.5", "9" * 10, "٣", "0"):
        assert FailedCall.of(Error(EXHAUSTED, "full", after)) == FailedCall("RESOURCE_EXHAUSTED", "full", 0)
    assert FailedCall.of(Error(EXHAUSTED, "full", "9" * 9)).retry_after_ms == 999_999_999
    cancelled = grpc.StatusCode.CANCELLED
    assert FailedCall.of(Error(cancelled, "late")).code == "CANCELLED"
    assert FailedCall.of(Error(cancelled, "CANCELLED")).code == "UNAVAILABLE"  # the server shuts down


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_all_attempts_together_keep_the_deadline(make):
    def slow(request, context):
        time.sleep(0.1)
        context.abort(UNAVAILABLE, "slowly")

    with peer(slow) as one, make(one.url, 4.0, retries=MANY) as client:
        assert 2 <= fails(client, timeout_seconds=0.8).attempts <= 8
        one.behave = refusing(EXHAUSTED, after_ms=5000)
        error = fails(client)  # at once, since the hint is beyond the deadline
        assert (error.code, error.retry_after_ms, error.attempts) == ("RESOURCE_EXHAUSTED", 5000, 1)


def test_calls_that_change_a_server_are_sent_once():
    with peer(refusing(UNAVAILABLE)) as one, Client(one.url, retries=QUICK) as client:
        with pytest.raises(ServerError):
            client.load("m")
        assert not client.ready()
        assert len(one.requests) == 2


def test_servers_take_turns_unless_one_is_named():
    with peer() as one, peer() as other, Client([one.url, other.url]) as client:
        assert Counter(client.infer("m", x()).call.server for _ in range(10)) == {one.url: 5, other.url: 5}
        assert {client.infer("m", x(), server=other.url).call.server for _ in range(5)} == {other.url}
        with pytest.raises(UsageError) as caught:
            client.infer("m", x(), server="elsewhere")
        assert str(caught.value).startswith(f"server: got 'elsewhere', expected one of {one.url}, {other.url}. Leave")
        with pytest.raises(UsageError, match="server for model 'm': got 2 servers, expected one of them"):
            client.load("m")
        assert len(one.requests) == 5
    for urls in ([], [""], ["a:1", "a:1"]):
        with pytest.raises(UsageError, match="expected one server, or different ones"):
            Client(urls)


def test_server_that_is_down_costs_one_attempt():
    with closed_port() as closed, peer() as one:
        with Client([closed, one.url]) as client:
            assert [client.infer("m", x()).call.attempts for _ in range(6)] == [2, 1, 1, 1, 1, 1]
        one.behave = refusing(UNAVAILABLE)
        with Client([closed, one.url], retries=ONCE) as client:
            assert [fails(client).attempts for _ in range(2)] == [1, 1]
        assert len(one.requests) == 6 + 1


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_no_request_is_lost_when_a_server_goes_and_returns(make):
    def slow(request, context):
        time.sleep(0.02)
        return doubled(request, context)

    with peer() as stays:
        with peer(slow) as goes:
            client = make([stays.url, goes.url])
            assert {client.infer("m", x()).call.server for _ in range(2)} == {stays.url, goes.url}
        with client:
            answers = [client.infer("m", x(number)) for number in range(50)]
            assert [answer.outputs["y"] for answer in answers] == [2 * number for number in range(50)]
            assert [answer.call.attempts for answer in answers].count(1) > 40
            with peer(port=int(goes.url.split(":")[1])):
                servers = (client.infer("m", x(), timeout_seconds=1).call.server for _ in iter(time.time, None))
                assert wait_until(lambda: goes.url in [next(servers), next(servers)])
                assert {client.infer("m", x()).call.server for _ in range(2)} == {stays.url, goes.url}
