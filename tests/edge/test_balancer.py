"""Three boards, with the published nginx before them or without: one dies under load, comes back, and little is lost.

Without a retry what was on its way to it is lost, with our client's retries nothing is.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge.bundles.bundle import Bundle
from edge.client import ONCE, Client, InferRequest, InferResult, Retries
from edge.client.retries import DEFAULT_RETRIES
from edge.errors import ServerError
from edge.load.measure import measure
from edge.load.plan import Plan, Rate
from tests.support.balanced_servers import QUESTION, Board, balancer, boards, followed, no_namespaces, reload
from tests.support.models import ORACLE, ORACLE_BUNDLE

THREADS = 8
#: Between a board's death and the moment at which nginx, and a client, have heard of it.
NEWS_SECONDS = 0.2

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["namespaces", "loopback"])
def _fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Board]]:
    reason = no_namespaces() if request.param == "namespaces" else ""
    if reason:
        pytest.skip(reason)
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(ORACLE_BUNDLE, repository / "oracle")
    with boards(repository, 3, namespaces=request.param == "namespaces") as made:
        yield made


@pytest.fixture
def fleet(_fleet: list[Board]) -> list[Board]:
    """All of them run, whatever the test before did."""
    for board in _fleet:
        if not board.runs():
            restart(board)
    return _fleet


@dataclass
class Asked:
    """What threads that ask without a pause got: when each call began and ended, and how."""

    answers: list[tuple[float, float, InferResult]] = field(default_factory=list)
    failures: list[tuple[float, float, ServerError]] = field(default_factory=list)

    def retried(self) -> int:
        return sum(result.call.attempts > 1 for _, _, result in self.answers)

    def servers(self, since: float) -> Counter[str]:
        return Counter(result.call.server for begun, _, result in self.answers if begun >= since)

    def longest(self) -> float:
        return max(ended - begun for begun, ended, _ in self.answers)

    def told(self) -> str:
        return f"{len(self.answers)} answers, {self.retried()} of them retried, {len(self.failures)} lost"


@contextmanager
def asking(servers: str | Sequence[str], retries: Retries = DEFAULT_RETRIES, seconds: float = 10.0) -> Iterator[Asked]:
    """Ask from several threads as long as the block runs."""
    asked, stop = Asked(), threading.Event()

    def ask(client: Client) -> None:
        while not stop.is_set():
            begun = time.monotonic()
            try:
                result = client.infer(ORACLE, QUESTION)
                assert result.outputs["value"][0, 0] == 2
                asked.answers.append((begun, time.monotonic(), result))
            except ServerError as error:
                asked.failures.append((begun, time.monotonic(), error))

    with Client(servers, seconds, retries=retries) as client:
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            yield asked
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def until(done: Callable[[], bool], seconds: float = 20.0) -> float:
    """Wait for something; return how long it took."""
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < seconds
        time.sleep(0.02)
    return time.monotonic() - begun


def restart(board: Board) -> None:
    board.start()
    board.wait()


@needs_nginx
def test_who_does_not_retry_loses_what_was_on_its_way(fleet: list[Board], tmp_path: Path) -> None:
    with balancer([board.url for board in fleet], tmp_path) as url, followed(tmp_path), asking(url, ONCE) as asked:
        time.sleep(1.5)
        assert min(board.answered() for board in fleet) > 0
        killed = time.monotonic()
        fleet[0].end(signal.SIGKILL)
        time.sleep(3.0)
        restart(fleet[0])
        back = until(lambda: fleet[0].answered() > 20)
        time.sleep(0.5)
    print(f"through nginx, no retries: {asked.told()}; traffic again {back:.2f} s after it was ready")
    assert len(asked.failures) <= THREADS
    assert {error.code for _, _, error in asked.failures} <= {"UNAVAILABLE"}
    assert all(begun < killed + NEWS_SECONDS for begun, _, _ in asked.failures), asked.failures


@needs_nginx
def test_who_retries_loses_nothing(fleet: list[Board], tmp_path: Path) -> None:
    with balancer([board.url for board in fleet], tmp_path) as url, asking(url) as asked:
        for board in fleet:
            time.sleep(0.5)
            board.end(signal.SIGKILL)
            time.sleep(0.5)
            restart(board)
            until(lambda board=board: board.answered() > 20)  # type: ignore[misc]
    print(f"through nginx, with retries, each board killed once: {asked.told()}; longest {asked.longest():.2f} s")
    assert not asked.failures


@needs_nginx
def test_an_open_loop_goes_on_over_a_death(fleet: list[Board], tmp_path: Path) -> None:
    def die_and_rise() -> None:
        time.sleep(2.0)
        fleet[1].end(signal.SIGKILL)
        time.sleep(2.5)  # until it is marked; one that is back sooner refuses while it loads
        restart(fleet[1])

    plan = Plan(rate=Rate(100.0, of_capacity=False), pattern="constant", seconds=8.0, warm_up_seconds=0.5)
    other = threading.Thread(target=die_and_rise)
    with balancer([board.url for board in fleet], tmp_path) as url, followed(tmp_path):
        other.start()
        report = measure(url, {Bundle.open(ORACLE_BUNDLE): 1.0}, plan)
        other.join()
        with asking(url):
            until(lambda: fleet[1].answered() > 0)
    answered = report.outcomes.get("in_time", 0)
    print(f"open loop of {report.requests}: {report.outcomes}, {report.causes}")
    assert report.requests == 800
    # What is on its way is the rate times how long it takes; on a machine that stood still that may be many.
    on_their_way = 100 * (NEWS_SECONDS + report.latency.max_ms / 1e3) / 3
    assert report.requests - answered <= on_their_way


@needs_nginx
def test_a_rolling_update_loses_nothing(fleet: list[Board], tmp_path: Path) -> None:
    """Each board in turn is taken out of the configuration, ends by SIGTERM, and comes back: no retry is needed."""
    with balancer([board.url for board in fleet], tmp_path) as url, asking(url, ONCE) as asked:
        for board in fleet:
            time.sleep(0.3)
            reload(tmp_path, f"server {board.url}", f"#server {board.url}")
            before = board.answered()
            time.sleep(0.2)
            assert board.answered() == before
            board.end(signal.SIGTERM)
            restart(board)
            reload(tmp_path, f"#server {board.url}", f"server {board.url}")
            until(lambda board=board: board.answered() > 20)  # type: ignore[misc]
    print(f"through nginx, rolling update, no retries: {asked.told()}")
    assert not asked.failures, asked.failures


@pytest.mark.parametrize("balanced", [pytest.param(True, marks=needs_nginx), False])
def test_boards_that_are_shut_down_unannounced(fleet: list[Board], tmp_path: Path, balanced: bool) -> None:
    urls = [board.url for board in fleet]
    with ExitStack() as stack:
        servers = stack.enter_context(balancer(urls, tmp_path)) if balanced else urls
        asked = stack.enter_context(asking(servers))
        for board in fleet:
            time.sleep(0.3)
            board.end(signal.SIGTERM)
            restart(board)
            until(lambda board=board: board.answered() > 20)  # type: ignore[misc]
    print(f"{'through nginx' if balanced else 'three addresses'}, SIGTERM to each: {asked.told()}")
    assert not asked.failures, asked.failures


@needs_nginx
def test_a_stream_to_a_killed_board_ends_with_an_error(fleet: list[Board], tmp_path: Path) -> None:
    stop, counts, errors = threading.Event(), [0] * 3, {}

    def questions() -> Iterator[InferRequest]:
        while not stop.wait(0.02):
            yield InferRequest(model=ORACLE, inputs=QUESTION)

    def follow(number: int) -> None:
        with Client(url) as client:
            try:
                for answer in client.infer_stream(questions()):
                    assert isinstance(answer, InferResult)
                    counts[number] += 1
            except ServerError as error:
                errors[number] = error

    with balancer([board.url for board in fleet], tmp_path) as url:
        threads = [threading.Thread(target=follow, args=(number,)) for number in range(3)]
        for number, thread in enumerate(threads):  # one after the other, so that each is on a board of its own
            thread.start()
            until(lambda number=number: counts[number] > 0)  # type: ignore[misc]
        fleet[2].end(signal.SIGKILL)
        until(lambda: len(errors) > 0)
        before = list(counts)
        time.sleep(0.5)
        stop.set()
        for thread in threads:
            thread.join()
        (number,) = errors
        print(f"a stream: {errors[number]}")
        assert errors[number].code in ("UNAVAILABLE", "INTERNAL")
        assert all(counts[other] > before[other] for other in range(3) if other != number)
        restart(fleet[2])
        with Client(url) as client:
            assert client.infer(ORACLE, QUESTION).outputs["value"][0, 0] == 2


@needs_nginx
def test_a_board_without_power(fleet: list[Board], tmp_path: Path) -> None:
    """Nobody is told of its end; what was on its way waits for the read timeout, and is then asked again."""
    if not fleet[0].url.startswith("198.18."):
        pytest.skip("a cable can only be taken away where there is one")
    values = {"grpc_read_timeout 5s;": "grpc_read_timeout 1s;"}
    with balancer([board.url for board in fleet], tmp_path, values) as url, asking(url) as asked:
        time.sleep(1.0)
        cut = time.monotonic()
        fleet[0].link("down")
        time.sleep(6.0)
        gone = len(asked.answers)
        fleet[0].link("up")
        before = fleet[0].answered()
        back = until(lambda: fleet[0].answered() > before + 20)
    print(f"through nginx, no power, 1 s: {asked.told()}; longest {asked.longest():.2f} s; back after {back:.2f} s")
    assert not asked.failures, asked.failures
    assert sum(begun > cut + 2.0 for begun, _, _ in asked.answers[:gone]) > 100


def test_without_a_balancer(fleet: list[Board]) -> None:
    urls = [board.url for board in fleet]
    with asking(urls) as asked:
        time.sleep(1.0)
        killed = time.monotonic()
        fleet[0].end(signal.SIGKILL)
        time.sleep(2.0)
        restarted = time.monotonic()
        restart(fleet[0])
        started = time.monotonic()
        until(lambda: asked.servers(restarted)[urls[0]] > 20)
    first = min(begun for begun, _, result in asked.answers if begun > restarted and result.call.server == urls[0])
    print(f"three addresses: {asked.told()}; longest {asked.longest():.2f} s; back after {first - started:.2f} s")
    assert not asked.failures
    assert set(asked.servers(0.0)) == set(urls)
    moved = [begun - killed for begun, _, result in asked.answers if result.call.attempts > 1 and begun < restarted]
    assert len(moved) <= 2 * THREADS, moved  # a thread may meet it twice before it is known to be gone
    assert max(moved) < NEWS_SECONDS, moved
