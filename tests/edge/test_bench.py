"""``fewheads bench``: closed and open loops on real servers, and plans and reports of a load."""

import json
import os
import re
import signal
import threading
import time
from itertools import islice

import msgspec
import numpy as np
import pytest

from edge.__main__ import cli
from edge.bench import open_loop
from edge.bench.inputs import drawn, read_texts, requests_of
from edge.bench.load_plan import LoadPlan, OfferedRate, due_times
from edge.bench.open_loop import LoadReport, measure
from edge.bench.sender import SentRequest
from edge.bench.timing import Percentiles
from edge.bundles.bundle import Bundle
from edge.client import Client
from edge.errors import ServerError, UsageError
from edge.launch import running_server
from tests.support.commands import fewheads, mistake, shown
from tests.support.models import EXPRESSIONS, ORACLE, ORACLE_BUNDLE
from tests.support.server_models import write_busy_bundle


@pytest.fixture(scope="module")
def oracle():
    return Bundle.open(ORACLE_BUNDLE)


@pytest.fixture(scope="module")
def busy(bundles):
    (path,) = [path for path in bundles if path.name == "busy-1"]
    return Bundle.open(path)


def test_bench_in_process_and_served(url):
    (report,) = json.loads(shown("bench", ORACLE_BUNDLE, "--requests", 50, "--json"))
    assert (report["model"], report["rows"], report["concurrency"]) == (ORACLE, 1, 1)
    for side in ("in_process", "served"):
        assert report[side]["count"] == 50
        assert 0 < report[side]["p50_ms"] <= report[side]["p95_ms"] <= report[side]["p99_ms"]
        assert report[side]["per_second"] > 0
    assert report["overhead_ratio"] == pytest.approx(report["served"]["p50_ms"] / report["in_process"]["p50_ms"])
    arguments = ("--requests", 60, "--rows", 3, "--concurrency", 2)
    before = served(url)
    text = shown("bench", ORACLE_BUNDLE, "--url", url, *arguments)
    assert all(word in text for word in ("in process", "served", "ratio", ORACLE))
    assert served(url) - before == 60 + 6  # a tenth of them before, to warm up
    line = mistake("bench", ORACLE_BUNDLE, "--url", url, "--requests", 10, "--rows", 65, code=7)
    assert "got 65 rows, expected at most 64" in line


def constant(rate, **options):
    return LoadPlan(rate=OfferedRate.parse(rate), pattern="constant", **{"warm_up_seconds": 0.0, **options})


def at_once(count, **options):
    return constant("1000000", requests=count, **options)


def checked(report):
    """Return a report whose counts agree with each other."""
    every = report.groups["all"]
    assert sum(every.outcomes.values()) == every.requests
    if len(report.models) > 1:
        assert sum(report.groups[name].requests for name in report.models) == every.requests
    assert every.latency.count == every.outcomes.get("in_time", 0) + every.outcomes.get("late", 0)
    assert sum(cause.count for cause in report.causes) == every.requests - every.latency.count
    return report


def served(url):
    with Client(url) as client:
        return sum(model.success_count for model in client.telemetry().models)


def test_models_get_equal_parts(url, oracle, busy):
    before = served(url)
    shares = []
    plan = constant("100", seconds=0.8, warm_up_seconds=0.2, priority=1, policy="full", deadline_ms=60000)
    report = checked(measure(url, [oracle, busy], plan, advanced=shares.append))
    every = report.groups["all"]
    assert (every.requests, every.outcomes, report.warm_up) == (80, {"in_time": 80}, {"in_time": 20})
    assert served(url) - before == 100
    assert list(report.groups) == ["all", ORACLE, "busy"]
    assert min(group.requests for group in report.groups.values()) > 20
    assert 0 < every.latency.p50_ms <= every.latency.p99_ms <= every.latency.max_ms
    assert report.in_time_per_second == pytest.approx(100)
    assert report.memory is not None
    assert 0 < report.memory.before_bytes <= report.memory.peak_bytes
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


#: A client's deadline is in its calls, too, so that the server may be the first to end one.
DEADLINES = {"client": ("Deadline Exceeded", "the deadline of the call passed"), "server": ("request",)}


@pytest.mark.parametrize(("enforcer", "causes"), DEADLINES.items())
def test_client_or_server_enforces_deadlines(url, busy, enforcer, causes):
    report = checked(measure(url, [busy], at_once(30, deadline_ms=3, enforcer=enforcer)))
    assert report.groups["all"].outcomes["expired"] > 0
    expired = {each.cause for each in report.causes if each.outcome == "expired"}
    assert expired & {f"DEADLINE_EXCEEDED {cause}" for cause in causes}
    assert not report.count("lost")


def test_rate_as_a_multiple_of_the_capacity(url, oracle):
    # The limit is of the run; the capacity is that of more clients.
    report = checked(measure(url, [oracle], constant("0.1x", seconds=0.5, max_outstanding=5)))
    assert report.capacity_per_second
    assert report.rate_per_second == pytest.approx(report.capacity_per_second / 10)
    assert report.groups["all"].requests == pytest.approx(report.rate_per_second / 2, abs=1)


def test_doubtful_runs_are_reported(url, oracle, busy):
    plan = constant("100", seconds=0.6)
    report = checked(measure(url, [oracle], plan, advanced=lambda share: time.sleep(0.04)))
    (doubt,) = report.doubts
    assert (report.lag.p99_ms > 20, report.groups["all"].latency.p99_ms > 20) == (True, True)  # from when it was due
    assert "the generator itself was late" in doubt
    report = checked(measure(url, [busy], at_once(50, max_outstanding=5)))
    outcomes = report.groups["all"].outcomes
    assert outcomes["in_time"] == 50 - outcomes["unsent"] < 50
    assert any("--max-outstanding" in doubt for doubt in report.doubts)


def run_bench(bundle, url, seconds):
    arguments = ["--rate=100", "--arrivals=constant", f"--seconds={seconds}", "--warm-up=0", f"--url={url}", "--json"]
    return cli.main(["bench", str(bundle.path), *arguments], standalone_mode=False)


def after_requests(url, act):
    """Start a thread that acts when the server has answered 20 more requests."""
    before = served(url)

    def wait_and_act():
        while served(url) < before + 20:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_dead_server_loses_requests_and_fails_later_ones(tmp_path, capsys):
    bundle = write_busy_bundle(tmp_path)

    def load_and_kill():
        with running_server([bundle.path], cache=tmp_path / "cache") as ready:
            url = f"127.0.0.1:{ready.grpc_port}"

            def kill():
                os.kill(ready.process_id, signal.SIGSTOP)  # requests that arrive now get no response
                time.sleep(0.3)
                os.kill(ready.process_id, signal.SIGKILL)

            thread = after_requests(url, kill)
            with pytest.raises(ServerError, match=r"that failed, and .* without any answer, expected"):
                run_bench(bundle, url, seconds=2)
            thread.join()

    with pytest.raises(ServerError, match="exit code -9"):
        load_and_kill()
    report = checked(msgspec.json.decode(capsys.readouterr().out, type=LoadReport))
    every = report.groups["all"]
    assert (every.requests, set(every.outcomes)) == (200, {"in_time", "failed", "lost"})
    assert every.outcomes["lost"] >= 5
    assert {cause.cause.split()[1] for cause in report.causes if cause.outcome == "failed"} == {"failed"}  # to connect


def test_ctrl_c_ends_the_run_and_keeps_its_report(url, oracle, capsys):
    thread = after_requests(url, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run_bench(oracle, url, seconds=60) == 130
    thread.join()
    report = checked(msgspec.json.decode(capsys.readouterr().out, type=LoadReport))
    assert report.interrupted
    assert 20 <= report.groups["all"].requests < 3000
    assert set(report.groups["all"].outcomes) <= {"in_time", "cancelled"}
    assert report.seconds < 30


def test_equal_seeds_draw_equal_requests(oracle, busy):
    def some(seed):
        models = [requests_of(bundle, constant("1")) for bundle in (oracle, busy)]
        return [(model.model, message) for model, message in islice(drawn(models, seed), 5000)]

    assert some(1) == some(1) != some(2)
    assert sum(model == "busy" for model, _ in some(1)) / 5000 == pytest.approx(1 / 2, abs=0.03)
    assert len({message for _, message in some(1)}) == len(EXPRESSIONS) + 1


def test_requests_reject_what_a_model_lacks(oracle, busy, tmp_path):
    for bundle, options, message in (
        (oracle, {"policy": "fast"}, "--policy for calculator-oracle: got 'fast', expected one of "),
        (oracle, {"max_loops": 3}, "--max-loops: got calculator-oracle, which has no loop, expected looped models"),
        (oracle, {"texts": ("1\t2",)}, "--texts: got a line of 2, .* expected 1, separated by tabs"),
        (busy, {"texts": ("1",)}, "expected none, since busy takes no text"),
    ):
        with pytest.raises(UsageError, match=message):
            requests_of(bundle, constant("1", **options))
    (tmp_path / "empty").write_text("\n \n")
    for name, message in (("empty", "got no lines, expected a file of texts"), ("absent", "No such file")):
        with pytest.raises(UsageError, match=message):
            read_texts(tmp_path / name)


def test_command_prints_a_report_and_fails_if_requests_failed(url, tmp_path):
    arguments = ("bench", ORACLE_BUNDLE, "--url", url, "--rate=100", "--seconds=0.4", "--warm-up=0")
    text = shown(*arguments, "--deadline-ms=5000")
    assert all(word in text for word in ("poisson", "100 requests/s", "in_time", "p99.9 ms"))
    (tmp_path / "texts").write_text("1 + 1\n3 times 4\n")
    done = fewheads(*arguments, "--texts", tmp_path / "texts")
    assert "INVALID_ARGUMENT expression" in done.stdout
    assert re.search(r"got [1-9]\d* requests that failed, and 0 without any answer, expected an answer, a", done.stderr)
    assert done.returncode == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--texts", "x"], "--texts: expected --rate beside it"),
        (["--seconds", "3"], "--seconds: expected --rate beside it. Add --rate, or"),
        (["--rate", "10", "--concurrency", "2"], "--concurrency: expected no clients beside --rate"),
        (["--rate", "0"], "--rate: got '0', expected a number above 0"),
        (["--rate", "9", "--deadline-ms", "nan"], "--deadline-ms: got nan, expected a number. Give"),
        (["--on-device", "--rows=2"], "--rows: expected no such option beside --on-device. Leave it out"),
        (["--rounds=3"], "--rounds: expected --on-device beside it"),
        (["--on-device", "--idle-gaps=1,x"], "--idle-gaps: got '1,x', expected seconds above 0, at most 600"),
        (["--on-device", "--out=/no/x"], "--out: got /no, which is not a directory, expected an existing directory"),
    ],
)
def test_contradictory_options_are_rejected(arguments, message):
    assert message in mistake("bench", ORACLE_BUNDLE, *arguments)


def test_name_without_its_bundle_is_rejected(url):
    assert "BUNDLE: got 'm', expected a bundle's directory, also with --url. perf_analyzer" in mistake(
        "bench", "m", "--url", url
    )


def requests(count=1000):
    """A request every 10 ms, whose number determines its model, its outcome and its latency in ms."""
    made = []
    for number in range(count):
        sent = SentRequest(["one", "two"][number % 2], number / 100, number / 1e5)
        if number % 10 == 9:
            cause, sent.retry_ms = "RESOURCE_EXHAUSTED queue", 20.0 + number % 3
            sent.outcome, sent.latency_seconds, sent.cause = "refused", 0.001, cause
        elif number % 10 != 8:  # every tenth stays lost
            sent.outcome, sent.latency_seconds = "late" if number >= 500 else "in_time", number / 1e3
            sent.tier = "lean" if number % 2 else ""
        made.append(sent)
    return made


def test_causes_have_counts_and_retry_hints_and_are_limited():
    lost, refused = open_loop.causes(requests())
    assert lost == open_loop.Cause("lost", "", 100, Percentiles(), None)
    assert (refused.cause, refused.count, refused.retry_after_p50_ms) == ("RESOURCE_EXHAUSTED queue", 100, 21.0)
    assert refused.latency.p50_ms == pytest.approx(1.0)
    many = [SentRequest("one", 0.0, 0.0, "failed", 0.1, f"message {number}") for number in range(3000)]
    causes = open_loop.causes(many)
    assert (len(causes), causes[0].cause, causes[0].count) == (1001, "other", 2000)


def load_report(sent, **options):
    facts = {"rate": 100.0, "capacity": 50.0, "interrupted": False, "memory": None}
    plan = LoadPlan(rate=OfferedRate(100.0, False), seconds=8.0, deadline_ms=50.0, warm_up_seconds=2.0)
    return open_loop.report_of(plan, sent, ["one", "two"], **{**facts, **options})


def test_report_leaves_out_the_warm_up():
    found = load_report(requests())
    assert found.warm_up == {"in_time": 160, "refused": 20, "lost": 20}
    every = found.groups["all"]
    assert every.outcomes == {"in_time": 240, "late": 400, "refused": 80, "lost": 80}
    assert (every.requests, every.latency.count, found.in_time_per_second) == (800, 640, 30.0)
    assert (found.count("lost"), found.seconds, found.lag_bound_ms) == (100, 8.0, 5.0)
    assert list(found.groups) == ["all", "one", "two", "answered by lean"]
    assert found.summary == "poisson, 100 requests/s, capacity 50, 50 ms: 800 requests in 8 s, 30 answers/s in time"
    interrupted = load_report(requests(501), interrupted=True, capacity=None)
    assert interrupted.seconds == pytest.approx(3.0)
    assert interrupted.summary.startswith("poisson, 100 requests/s, 50 ms: 301 requests in 3 s, ")


def test_invalid_rates_are_rejected():
    for text in ("fast", "-1", "nanx", "infx", ""):
        with pytest.raises(UsageError, match=f"--rate: got '{text}', expected a number above 0"):
            OfferedRate.parse(text)


def test_gaps_of_poisson_arrivals_are_exponential():
    rate = 250.0
    gaps = np.diff(np.fromiter(islice(due_times("poisson", rate, 7), 20_000), float), prepend=0.0)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.05)  # of an exponential distribution the mean
