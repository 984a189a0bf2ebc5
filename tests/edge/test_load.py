"""Open-loop load on real servers, and its arrivals, options, report and picture."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge.__main__ import cli
from edge.bench import report
from edge.bench.inputs import read_texts
from edge.bench.open_loop import goodput, measure
from edge.bench.plan import Plan, Rate, due_times, parse_mix, parse_number_mix, read_trace
from edge.bench.plot import COLORS, draw
from edge.bench.report import LoadReport, Memory
from edge.bench.sender import OUTCOMES, Record
from edge.bench.timing import Percentiles
from edge.bench.workload import Kind, Workload
from edge.bundles.bundle import Bundle
from edge.client import Client
from edge.errors import ServerError, UsageError
from edge.launch import running_server
from tests.support.commands import answer, fewheads, mistake
from tests.support.models import EXPRESSIONS, ORACLE, ORACLE_BUNDLE
from tests.support.server_models import write_busy_bundle
from tests.support.tiered_model import write_tiered_bundle


@pytest.fixture(scope="module")
def oracle() -> Bundle:
    return Bundle.open(ORACLE_BUNDLE)


@pytest.fixture(scope="module")
def busy(bundles: list[Path]) -> Bundle:
    (path,) = [path for path in bundles if path.name == "busy-1"]
    return Bundle.open(path)


def at_once(count: int, **options: Any) -> Plan:
    return Plan(trace=array("d", [0.0] * count), **options)


def checked(report: LoadReport) -> LoadReport:
    """Return a report whose counts agree with each other."""
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


def test_models_and_priorities_get_their_shares(url: str, oracle: Bundle, busy: Bundle) -> None:
    before = served(url)
    options: dict[str, Any] = {"priorities": {1: 1.0, 5: 3.0}, "deadlines_ms": {60000: 1.0}}
    plan = Plan(rate=Rate.parse("100"), pattern="constant", seconds=0.8, warm_up_seconds=0.2, **options)
    shares: list[float] = []
    report = checked(measure(url, {oracle: 3.0, busy: 1.0}, plan, advanced=shares.append))
    assert (report.requests, report.outcomes) == (80, {"in_time": 80})
    assert report.warm_up == {"in_time": 20}
    assert served(url) - before == 100
    assert {group.name: group.requests > 40 for group in report.by_model} == {"busy": False, ORACLE: True}
    assert {group.name: group.requests > 40 for group in report.by_priority} == {"1": False, "5": True}
    assert 0 < report.latency.p50_ms <= report.latency.p99_ms <= report.latency.max_ms
    assert report.in_time_per_second == pytest.approx(100)
    assert report.memory is not None
    assert 0 < report.memory.before_bytes <= report.memory.peak_bytes
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(("enforcer", "cause"), [("client", "Deadline Exceeded"), ("server", "request")])
def test_client_or_server_enforces_deadlines(url: str, busy: Bundle, enforcer: str, cause: str) -> None:
    plan = at_once(30, deadlines_ms={3: 1.0}, enforcer=enforcer)
    report = checked(measure(url, {busy: 1.0}, plan))
    assert report.outcomes["expired"] > 0
    assert f"DEADLINE_EXCEEDED {cause}" in {each.cause for each in report.causes if each.outcome == "expired"}
    assert not report.lost


def test_rate_as_a_multiple_of_the_capacity(url: str, oracle: Bundle) -> None:
    # The limit is of the run; the capacity is that of more clients.
    plan = Plan(rate=Rate.parse("0.1x"), pattern="constant", seconds=0.5, warm_up_seconds=0.0, max_outstanding=5)
    report = checked(measure(url, {oracle: 1.0}, plan))
    assert report.capacity_per_second
    assert report.rate_per_second == pytest.approx(report.capacity_per_second / 10)
    assert report.requests == pytest.approx(report.rate_per_second / 2, abs=1)


def test_late_generator_is_reported_and_counts_as_latency(url: str, oracle: Bundle) -> None:
    plan = Plan(rate=Rate(100.0, of_capacity=False), pattern="constant", seconds=0.6, warm_up_seconds=0.0)
    report = checked(measure(url, {oracle: 1.0}, plan, advanced=lambda share: time.sleep(0.04)))
    assert report.lag.p99_ms > 20
    assert report.latency.p99_ms > 20  # from when it was due
    (doubt,) = report.doubts
    assert "the generator itself was late" in doubt


def test_requests_in_flight_are_limited(url: str, busy: Bundle) -> None:
    report = checked(measure(url, {busy: 1.0}, at_once(50, max_outstanding=5)))
    assert report.outcomes["in_time"] == 50 - report.outcomes["unsent"] < 50
    assert any("--max-outstanding" in doubt for doubt in report.doubts)


def test_texts_replace_the_golden_inputs(url: str, oracle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("\n".join(EXPRESSIONS) + "\n\n1 + + 2\n")
    report = checked(measure(url, {oracle: 1.0}, at_once(100, texts=read_texts(tmp_path / "texts"))))
    (cause,) = report.causes
    assert (cause.outcome, cause.cause.split()[0]) == ("failed", "INVALID_ARGUMENT")
    assert report.outcomes["in_time"] + cause.count == 100


def run_bench(bundle: Bundle, url: str, seconds: int) -> Any:
    arguments = ["--rate=100", "--arrivals=constant", f"--seconds={seconds}", "--warm-up=0", f"--url={url}", "--json"]
    return cli.main(["bench", str(bundle.path), *arguments], standalone_mode=False)


def after_requests(url: str, act: Callable[[], object]) -> threading.Thread:
    """Start a thread that acts when the server has answered 20 more requests."""
    before = served(url)

    def wait_and_act() -> None:
        while served(url) < before + 20:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_dead_server_loses_requests_and_fails_later_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_busy_bundle(tmp_path)

    def load_and_kill() -> None:
        with running_server([bundle.path], cache=tmp_path / "cache") as ready:
            url = f"127.0.0.1:{ready.grpc_port}"

            def kill() -> None:
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
    assert report.requests == 200
    assert set(report.outcomes) == {"in_time", "failed", "lost"}
    assert report.lost == report.outcomes["lost"] >= 5
    assert {cause.cause.split()[1] for cause in report.causes if cause.outcome == "failed"} == {"failed"}  # to connect


def test_ctrl_c_ends_the_run_and_keeps_its_report(url: str, oracle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    thread = after_requests(url, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run_bench(oracle, url, seconds=60) == 130
    thread.join()
    report = checked(msgspec.json.decode(capsys.readouterr().out, type=LoadReport))
    assert report.interrupted
    assert 20 <= report.requests < 3000
    assert set(report.outcomes) <= {"in_time", "cancelled"}
    assert report.seconds < 30


def test_equal_seeds_draw_equal_requests(oracle: Bundle, busy: Bundle) -> None:
    def drawn(seed: int) -> list[tuple[int, bytes]]:
        workload = Workload({oracle: 1.0, busy: 2.0}, Plan(seed=seed))
        return [workload.draw() for _ in range(5000)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert sum(kind for kind, _ in drawn(1)) / 5000 == pytest.approx(2 / 3, abs=0.03)
    assert len({message for _, message in drawn(1)}) == len(EXPRESSIONS) + 1


def test_workload_rejects_what_a_model_lacks(oracle: Bundle, busy: Bundle, tmp_path: Path) -> None:
    for bundle, plan, message in (
        (oracle, Plan(policies={"fast": 1.0}), "--policy for calculator-oracle: got 'fast', expected one of pinned, "),
        (oracle, Plan(texts=("1\t2",)), "--texts: got a line of 2, .* expected 1, separated by tabs"),
        (busy, Plan(texts=("1",)), "expected none, since busy takes no text"),
    ):
        with pytest.raises(UsageError, match=message):
            Workload({bundle: 1.0}, plan)
    (tmp_path / "empty").write_text("\n \n")
    for name, message in (("empty", "got no lines, expected at least one"), ("absent", "expected a file of texts")):
        with pytest.raises(UsageError, match=message):
            read_texts(tmp_path / name)


def test_command_prints_and_draws_a_report(url: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "report.svg"
    arguments = ["--rate=100", "--seconds=0.5", "--warm-up=0", "--deadline-ms=5000", f"--plot={plot}"]
    text = answer(fewheads("bench", ORACLE_BUNDLE, "--url", url, *arguments))
    assert all(word in text for word in ("poisson", "100 requests/s", "in_time", "p99.9 ms"))
    assert plot.read_text().startswith("<?xml")


def test_failed_requests_are_an_error_of_the_command(url: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("1 + 1\n3 times 4\n")
    arguments = ("--rate=100", "--seconds=0.3", "--warm-up=0", "--texts", tmp_path / "texts")
    done = fewheads("bench", ORACLE_BUNDLE, "--url", url, *arguments)
    assert "INVALID_ARGUMENT expression" in done.stdout
    assert re.search(r"got [1-9]\d* requests that failed, and 0 without any answer, expected an answer, a", done.stderr)
    assert done.returncode == 6


def test_contradictory_options_are_rejected() -> None:
    for arguments, message in (
        (["--seconds", "3"], "--seconds: got it alone, expected --rate or --trace beside it"),
        (["--rate", "10", "--concurrency", "2"], "--concurrency: got it with --rate, expected no clients"),
        (["--rate", "10", "--trace", "x"], "arrivals: got both --rate and --trace, expected one of them"),
        (["--rate", "10", "--plot", "x.html"], "--plot: got 'x.html', expected a name that ends in .png, .svg or .pdf"),
        (["--rate=1", "--plot=no/x.pdf"], "--plot: got no, which is not a directory, expected an existing directory"),
        (["--rate", "10", "--weights", "1,2"], "--weights: got '1,2', expected 1 numbers above 0"),
        (["--rate", "10", "--priority", "1.5"], "--priority: got '1.5', expected a whole number, 1 to 10. Write"),
        (["--rate", "10", "--deadline-ms", "0.5"], "--deadline-ms: got '0.5', expected 1 or more"),
    ):
        assert message in mistake("bench", ORACLE_BUNDLE, *arguments)


POLICIES = ("pinned", "load", "deadline")


@pytest.mark.slow
def test_leaner_tiers_raise_the_goodput(tmp_path: Path) -> None:
    write_tiered_bundle(tmp_path / "tiered")
    options: dict[str, Any] = {"target": "onnxruntime", "cache": tmp_path / "cache", "seconds": 4.0, "rounds": 3}
    report = goodput(tmp_path / "tiered", policies=POLICIES, factor=2.0, deadline_ms=None, **options)
    by_policy = {burst.policy: burst for burst in report.bursts}
    assert list(by_policy) == list(POLICIES)
    pinned = by_policy["pinned"]
    assert set(pinned.tiers) == {"full"}
    assert pinned.refused > 0.2 * pinned.sent  # at once, beyond its capacity
    for burst in report.bursts:
        assert burst.sent == math.ceil(report.offered_per_second * 4.0) * 3
        assert burst.sent == burst.in_time + burst.refused + burst.late
        assert burst.p99_ms <= report.deadline_ms
    assert by_policy["load"].per_second > 1.2 * pinned.per_second
    # It uses all of the time until the deadline, so any disturbance makes some responses late.
    assert by_policy["deadline"].per_second > pinned.per_second
    for policy in ("load", "deadline"):
        assert set(by_policy[policy].tiers) - {"full"}


def test_model_with_one_tier_is_rejected() -> None:
    message = "BUNDLE: got calculator-oracle with one tier, expected one with several tiers"
    with pytest.raises(UsageError, match=message):
        goodput(ORACLE_BUNDLE, policies=POLICIES, factor=2, seconds=1, rounds=1, deadline_ms=None)


KINDS = [Kind("one", "", 0, 50.0, False), Kind("two", "", 0, 0.0, True)]


def record_of(count: int = 1000) -> Record:
    """A request every 10 ms, whose number determines its kind, its outcome and its latency in ms."""
    record = Record()
    for number in range(count):
        row = record.sent(number / 100, number / 1e5, number % 2)
        if number % 10 == 9:
            record.ended(row, 0.001, "refused", "RESOURCE_EXHAUSTED queue", 20.0 + number % 3)
        elif number % 10 != 8:  # every tenth stays lost
            record.answered(row, number / 1e3, late=number >= 500, tier="lean" if number % 2 else "")
    return record


def test_causes_have_counts_and_retry_hints_and_are_limited() -> None:
    lost, refused = report.causes(record_of().columns())
    assert lost == report.Cause("lost", "", 100, Percentiles(), None)
    assert (refused.cause, refused.count, refused.retry_after_p50_ms) == ("RESOURCE_EXHAUSTED queue", 100, 21.0)
    assert refused.latency.p50_ms == pytest.approx(1.0)
    record = Record()
    for number in range(3000):
        record.ended(record.sent(0.0, 0.0, 0), 0.1, "failed", f"message {number}")
    causes = Counter(record.columns().cause.tolist())
    assert len(causes) <= 1001
    assert causes["other"] > 1900


def test_intervals_suit_the_length_and_lags_the_deadlines() -> None:
    found = [report.interval_of(seconds) for seconds in (0.5, 3, 9, 20, 600, 601, 86400)]
    assert found == [0.05, 0.1, 0.2, 1, 1, 10, 1000]
    assert [report.lag_bound_ms(deadlines) for deadlines in ((), (0.0,), (0.0, 200.0, 50.0))] == [10, 10, 5]


MEMORY = Memory(10**6, 3 * 10**6, 3 * 10**6, ((0.0, 10**6), (9.5, 3 * 10**6)))


def load_report(record: Record, **options: Any) -> LoadReport:
    facts = {"rate": 100.0, "capacity": 50.0, "warm_up_seconds": 2.0, "interrupted": False, "memory": MEMORY}
    plan = Plan(seconds=8.0)
    return report.report_of(plan, KINDS, record.columns(), **{**facts, **options})


def test_report_leaves_out_the_warm_up() -> None:
    found = load_report(record_of())
    assert found.warm_up == {"in_time": 160, "refused": 20, "lost": 20}
    assert found.outcomes == {"in_time": 240, "late": 400, "refused": 80, "lost": 80}
    assert (found.requests, found.latency.count, found.in_time_per_second, found.lost) == (800, 640, 30.0, 100)
    assert (found.seconds, len(found.timeline), found.deadlines_ms) == (8.0, 40, (0.0, 50.0))
    assert [name for name, _ in found.named_groups()] == ["all", "one", "two", "answered by lean"]
    assert found.summary == "poisson, 100 requests/s, capacity 50, 50 ms: 800 requests in 8 s, 30 answers/s in time"
    interrupted = load_report(record_of(501), interrupted=True, capacity=None)
    assert interrupted.seconds == pytest.approx(3.0)
    assert interrupted.summary.startswith("poisson, 100 requests/s, 50 ms: 301 requests in 3 s, ")


def test_plot_shows_outcomes_deadlines_and_doubts_or_no_responses(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        draw(load_report(record_of()), tmp_path / "report.svg")
    svg = (tmp_path / "report.svg").read_text()
    words = ("in time", "late", "refused", "lost", "deadline 50 ms", "p50", "p99", "99", "one, two: poisson")
    assert all(word in svg for word in (*words, "Not to be trusted: the generator itself was late"))
    assert all(COLORS[name] in svg for name in ("in_time", "late", "refused", "lost"))
    assert len(set(COLORS.values())) == len(OUTCOMES) == len(COLORS)
    empty = load_report(Record(), memory=None)
    for suffix, magic in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        draw(empty, tmp_path / f"report{suffix}")
        assert (tmp_path / f"report{suffix}").read_bytes().startswith(magic)
    with pytest.raises(UsageError, match=r"none/x\.png: got .*, expected a file to write"):
        draw(empty, Path("/proc/none/x.png"))


def test_invalid_rates_and_mixes_are_rejected() -> None:
    for text in ("fast", "0", "-1", "nanx", "infx", ""):
        with pytest.raises(UsageError, match=f"--rate: got '{text}', expected a number above 0"):
            Rate.parse(text)
    for text in ("=2", "1=0", "1=many", "", "1=inf,2"):
        with pytest.raises(UsageError, match=r"--policy: got '.*', expected a value and its parts, a number above 0"):
            parse_mix("--policy", text)
    assert parse_number_mix("--priority", "1, 10=2.5,1=3", 1, 10, whole=True) == {1: 4, 10: 2.5}
    assert parse_number_mix("--deadline-ms", "1.5", 1, 10) == {1.5: 1}
    for text in ("0", "11", "soon", "1.5"):
        with pytest.raises(UsageError, match=f"--priority: got '{text}', expected a whole number, 1 to 10"):
            parse_number_mix("--priority", text, 1, 10, whole=True)


RATE = 250.0


def due(pattern: str, count: int = 20_000) -> np.ndarray:
    return np.fromiter(islice(due_times(pattern, RATE, 7), count), float)


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(due("poisson"), prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / RATE, rel=0.02)
    assert gaps.std() == pytest.approx(1 / RATE, rel=0.03)  # of an exponential distribution the mean
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_bursts_keep_the_mean_rate_and_pause_in_between() -> None:
    times = due("burst")
    assert (np.diff(times) > 0).all()
    assert (times % 1.0).max() < 0.5
    assert len(times) / times[-1] == pytest.approx(RATE, rel=0.03)
    within = np.diff(times)
    within = within[within < 0.5]
    assert within.mean() == pytest.approx(1 / (2 * RATE), rel=0.03)
    assert within.std() == pytest.approx(1 / (2 * RATE), rel=0.05)


def test_trace_starts_at_zero_and_holds_seconds_in_order(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('100.5\n{"at": 101, "who": "someone"}\n\n101\n103.25\n')
    assert list(read_trace(tmp_path / "trace")) == [0.0, 0.5, 0.5, 2.75]
    for text, message in (
        ("", "no times"),
        ("1\n0.5\n", "line 2: got 0.5, expected 1 or later"),
        ("soon\n", "line 1: got soon, expected seconds"),
        ('{"when": 1}\n', "expected seconds"),
        ("1e999\n", "expected seconds"),
    ):
        (tmp_path / "trace").write_text(text)
        with pytest.raises(UsageError, match=message):
            read_trace(tmp_path / "trace")
    with pytest.raises(UsageError, match="expected a file to read"):
        read_trace(tmp_path / "absent")
