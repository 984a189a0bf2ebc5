"""The open loop against real servers: every request ends in one way, and the generator says when it is at fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from edge.bundles.bundle import Bundle
from edge.cli.bench import bench
from edge.client import Client
from edge.errors import ServerError, UsageError
from edge.launch import running_server
from edge.load.measure import Plan, Rate, measure
from edge.load.report import LoadReport
from edge.load.workload import Shares, Workload, read_texts
from tests.support.commands import SECONDS, answer, fewheads
from tests.support.models import EXPRESSIONS, ORACLE, ORACLE_BUNDLE
from tests.support.server_models import write_busy_bundle


@pytest.fixture(scope="module")
def oracle() -> Bundle:
    return Bundle.open(ORACLE_BUNDLE)


@pytest.fixture(scope="module")
def busy(bundles: list[Path]) -> Bundle:
    (path,) = [path for path in bundles if path.name == "busy-1"]
    return Bundle.open(path)


def at_once(count: int, **options: Any) -> Plan:
    return Plan(rate=None, trace=array("d", [0.0] * count), **options)


def checked(report: LoadReport) -> LoadReport:
    """A report whose every way to count comes to the same."""
    assert sum(report.outcomes.values()) == report.requests
    for groups in (report.by_model, report.by_choice, report.by_priority):
        assert not groups or sum(group.requests for group in groups) == report.requests
    answered = report.outcomes.get("in_time", 0) + report.outcomes.get("late", 0)
    assert report.latency.count == answered
    assert sum(cause.count for cause in report.causes) == report.requests - answered
    assert sum(sum(point.outcomes.values()) for point in report.timeline) == report.requests
    return report


def served(url: str) -> int:
    with Client(url) as client:
        return sum(model.success_count for model in client.telemetry().models)


def test_every_request_is_answered_in_its_share(url: str, oracle: Bundle, busy: Bundle) -> None:
    before = served(url)
    plan = Plan(
        rate=Rate(200.0, of_capacity=False),
        pattern="constant",
        seconds=0.8,
        warm_up_seconds=0.2,
        priorities=Shares.parse("--priority", "1=1,5=3"),
        deadlines_ms=Shares.parse("--deadline-ms", "60000"),
    )
    shares: list[float] = []
    report = checked(measure(url, {oracle: 3.0, busy: 1.0}, plan, advanced=shares.append))
    assert (report.requests, report.outcomes) == (160, {"in_time": 160})
    assert report.warm_up == {"in_time": 40}
    assert served(url) - before == 200
    assert {group.name: group.requests > 80 for group in report.by_model} == {"busy": False, ORACLE: True}
    assert {group.name: group.requests > 80 for group in report.by_priority} == {"1": False, "5": True}
    assert 0 < report.latency.p50_ms <= report.latency.p99_ms <= report.latency.max_ms
    assert report.in_time_per_second == pytest.approx(200)
    assert report.memory is not None
    assert 0 < report.memory.before_bytes <= report.memory.peak_bytes
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_full_queue_refuses_and_says_when_to_come_again(url: str, busy: Bundle) -> None:
    report = checked(measure(url, {busy: 1.0}, at_once(200)))
    assert report.outcomes["in_time"] >= 32
    (cause,) = report.causes
    assert (cause.outcome, cause.cause, cause.count) == (
        "refused",
        "RESOURCE_EXHAUSTED queue",
        report.outcomes["refused"],
    )
    assert (cause.retry_after_p50_ms or 0) >= 1


@pytest.mark.parametrize(
    ("enforcer", "cause"),
    [("client", "DEADLINE_EXCEEDED Deadline Exceeded"), ("server", "DEADLINE_EXCEEDED request")],
)
def test_a_deadline_ends_requests_on_either_side(url: str, busy: Bundle, enforcer: str, cause: str) -> None:
    plan = at_once(30, deadlines_ms=Shares.parse("--deadline-ms", "3"), enforcer=enforcer)
    report = checked(measure(url, {busy: 1.0}, plan))
    assert report.outcomes["expired"] > 0
    assert cause in {each.cause for each in report.causes if each.outcome == "expired"}
    assert not report.lost


def test_a_rate_may_be_a_multiple_of_the_capacity(url: str, oracle: Bundle) -> None:
    plan = Plan(rate=Rate.parse("0.1x"), pattern="constant", seconds=0.5, warm_up_seconds=0.0)
    report = checked(measure(url, {oracle: 1.0}, plan))
    assert report.capacity_per_second
    assert report.rate_per_second == pytest.approx(report.capacity_per_second / 10)
    assert report.requests == pytest.approx(report.rate_per_second / 2, abs=1)


def test_a_generator_that_is_late_says_so_and_hides_no_delay(url: str, oracle: Bundle) -> None:
    plan = Plan(rate=Rate(100.0, of_capacity=False), pattern="constant", seconds=0.6, warm_up_seconds=0.0)
    report = checked(measure(url, {oracle: 1.0}, plan, advanced=lambda share: time.sleep(0.04)))
    assert report.lag.p99_ms > 20
    assert report.latency.p99_ms > 20  # from when it was due
    (doubt,) = report.doubts
    assert "the generator itself was late" in doubt


def test_requests_on_their_way_are_bounded(url: str, busy: Bundle) -> None:
    report = checked(measure(url, {busy: 1.0}, at_once(50, max_outstanding=5)))
    assert report.outcomes["in_time"] == 50 - report.outcomes["unsent"] < 50
    assert any("--max-outstanding" in doubt for doubt in report.doubts)


def test_texts_from_a_file(url: str, oracle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("\n".join(EXPRESSIONS) + "\n\n1 + + 2\n")
    texts = tuple(read_texts(tmp_path / "texts"))
    report = checked(measure(url, {oracle: 1.0}, at_once(100, texts=texts)))
    (cause,) = report.causes
    assert (cause.outcome, cause.cause.split()[0]) == ("failed", "INVALID_ARGUMENT")
    assert report.outcomes["in_time"] + cause.count == 100


def freeze_and_kill(process_id: int) -> None:
    time.sleep(0.3)
    os.kill(process_id, signal.SIGSTOP)  # what it gets from now on it never answers
    time.sleep(0.3)
    os.kill(process_id, signal.SIGKILL)


def test_what_a_dead_server_had_taken_is_lost_and_what_it_never_got_has_failed(tmp_path: Path) -> None:
    bundle = write_busy_bundle(tmp_path)
    plan = Plan(rate=Rate(100.0, of_capacity=False), pattern="constant", seconds=1.0, warm_up_seconds=0.0)

    reports: list[LoadReport] = []

    def load_and_kill() -> None:
        with running_server([bundle.path], cache=tmp_path / "cache") as ready:
            killer = threading.Thread(target=freeze_and_kill, args=(ready.process_id,))
            killer.start()
            reports.append(measure(f"127.0.0.1:{ready.grpc_port}", {bundle: 1.0}, plan))
            killer.join()

    with pytest.raises(ServerError, match="exit code -9"):
        load_and_kill()
    report = checked(reports[0])
    assert report.requests == 100
    assert set(report.outcomes) == {"in_time", "failed", "lost"}
    assert report.lost == report.outcomes["lost"] >= 5
    assert {cause.cause.split()[1] for cause in report.causes if cause.outcome == "failed"} == {"failed"}  # to connect


def test_an_answer_that_never_comes_is_lost(tmp_path: Path) -> None:
    bundle = write_busy_bundle(tmp_path)
    deadline = Shares.parse("--deadline-ms", "50")
    with running_server([bundle.path], cache=tmp_path / "cache") as ready:
        plan = at_once(5, deadlines_ms=deadline, enforcer="server", patience_seconds=0.2)
        stop = threading.Event()

        def freeze(share: float) -> None:
            if not stop.is_set():
                stop.set()
                os.kill(ready.process_id, signal.SIGSTOP)

        try:
            report = checked(measure(f"127.0.0.1:{ready.grpc_port}", {bundle: 1.0}, plan, advanced=freeze))
        finally:
            os.kill(ready.process_id, signal.SIGCONT)
    assert report.outcomes == {"lost": 5}


def test_ctrl_c_ends_the_run_and_keeps_what_there_is(url: str, oracle: Bundle) -> None:
    plan = Plan(rate=Rate(100.0, of_capacity=False), seconds=60.0, warm_up_seconds=0.0)
    sent: list[float] = []

    def interrupt(share: float) -> None:
        if share * plan.seconds > 0.3 and not sent:
            sent.append(share)
            os.kill(os.getpid(), signal.SIGINT)

    report = checked(measure(url, {oracle: 1.0}, plan, advanced=interrupt))
    assert report.interrupted
    assert 0 < report.requests < 2000
    assert set(report.outcomes) <= {"in_time", "cancelled"}
    assert report.seconds < 10


def test_the_same_seed_asks_the_same(oracle: Bundle, busy: Bundle) -> None:
    def drawn(seed: int) -> list[tuple[int, bytes]]:
        workload = Workload({oracle: 1.0, busy: 2.0}, seed=seed)
        return [workload.draw() for _ in range(5000)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert sum(kind for kind, _ in drawn(1)) / 5000 == pytest.approx(2 / 3, abs=0.03)
    assert len({message for _, message in drawn(1)}) == len(EXPRESSIONS) + 1


# Wrong usage


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nanx", "x", "infx", ""])
def test_a_rate_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--rate: got"):
        Rate.parse(text)


@pytest.mark.parametrize("text", ["=2", "=", "1=0", "1=many", "", "1=inf,2"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--priority: got"):
        Shares.parse("--priority", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priorities": Shares(("11",), (1.0,))}, "--priority: got '11', expected 1 to 10"),
        ({"deadlines_ms": Shares(("soon",), (1.0,))}, "--deadline-ms: got 'soon'"),
        ({"choices": Shares(("fast",), (1.0,))}, "--policy for calculator-oracle: got 'fast'"),
        ({"texts": ["1\t2"]}, "--texts: got a line of 2"),
    ],
)
def test_a_workload_that_does_not_fit(oracle: Bundle, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workload({oracle: 1.0}, **options)


def test_texts_for_a_model_that_takes_none(busy: Bundle) -> None:
    with pytest.raises(UsageError, match="busy takes no text"):
        Workload({busy: 1.0}, texts=["1"])


def test_texts_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for name, message in (("empty", "no lines"), ("absent", "a file of texts")):
        with pytest.raises(UsageError, match=message):
            read_texts(tmp_path / name)


# The command


def test_the_command_shows_and_writes_a_report(url: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ("--rate", 100, "--seconds", 0.5, "--warm-up", 0, "--deadline-ms", 5000, "--report", page)
    text = answer(fewheads("bench", ORACLE_BUNDLE, "--url", url, *arguments))
    assert all(word in text for word in ("poisson", "100 requests/s", "in_time", "p99.9 ms"))
    html = page.read_text()
    assert html.count("<svg") == 4
    assert "http" not in html  # it fetches nothing
    assert "<script" not in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "3"], "--seconds: got it alone"),
        (["--rate", "10", "--concurrency", "2"], "--concurrency: got it with --rate"),
        (["--rate", "10", "--trace", "x"], "both --rate and --trace"),
        (["--rate", "10", "--report", "x.pdf"], "a name that ends in .html"),
        (["--rate", "10", "--report", "nowhere/x.html"], "a directory that is there"),
        (["--rate", "10", "--weights", "1,2"], "1 numbers above 0"),
        (["--rate", "10", "--url", "127.0.0.1:1", "--server-option=--instances=2"], "a server to start"),
    ],
)
def test_options_that_contradict_each_other(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench.main([str(ORACLE_BUNDLE), *arguments], standalone_mode=False)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 6), (signal.SIGINT, 130)])
def test_the_exit_code_tells_of_lost_requests_and_of_ctrl_c(tmp_path: Path, number: int, code: int) -> None:
    bundle = write_busy_bundle(tmp_path)
    command = [sys.executable, "-m", "edge", "bench", str(bundle.path), "--rate=50", "--seconds=3", "--json"]
    server = running_server([bundle.path], cache=tmp_path / "cache")
    ready = server.__enter__()
    url = f"127.0.0.1:{ready.grpc_port}"
    process = subprocess.Popen([*command, f"--url={url}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while served(url) < 80:  # it is past its warm-up
        time.sleep(0.02)
    if number == signal.SIGKILL:
        freeze_and_kill(ready.process_id)
    else:
        process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == code, error
    assert "Traceback" not in error
    report = json.loads(out)
    assert sum(report["outcomes"].values()) == report["requests"] > 20
    assert report["interrupted"] == (number == signal.SIGINT)
    if number == signal.SIGKILL:
        assert report["outcomes"]["lost"] > 0
        assert "requests without any answer" in error
        with pytest.raises(ServerError, match="exit code -9"):
            server.__exit__(None, None, None)
    else:
        server.__exit__(None, None, None)
