"""Arrivals, options, report and picture of a load run, without a server."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import UsageError
from edge.load import report
from edge.load.arrivals import due_times, read_trace
from edge.load.percentiles import Percentiles
from edge.load.plan import Plan, Rate, parse_mix, parse_number_mix
from edge.load.plot import COLORS, draw
from edge.load.record import OUTCOMES, Record
from edge.load.report import LoadReport, Memory
from edge.load.workload import Kind

KINDS = [Kind("one", "", 0, 50.0, False), Kind("two", "", 0, 0.0, True)]


def record_of(count: int = 1000) -> Record:
    """A request every 10 ms, whose number determines its kind, its outcome and its latency in ms."""
    record = Record()
    for number in range(count):
        row = record.sent(number / 100, number / 1e6, number % 2)
        if number % 10 == 9:
            record.ended(row, 0.001, "refused", "RESOURCE_EXHAUSTED queue", 20.0 + number % 3)
        elif number % 10 != 8:  # every tenth stays lost
            record.answered(row, number / 1e3, late=number >= 500, tier="lean" if number % 2 else "")
    return record


def test_groups_by_kind_and_tier() -> None:
    columns = record_of().columns()
    one, two = report.groups(columns, KINDS, lambda kind: kind.model)
    assert np.isnan(columns.latency[8])
    assert (one.name, one.requests, one.outcomes["lost"]) == ("one", 500, 100)
    assert (two.name, two.requests, two.outcomes["refused"]) == ("two", 500, 100)
    assert one.latency.count == 400
    assert report.groups(columns, KINDS, lambda kind: str(kind.priority)) == ()
    (lean,) = report.tiers(columns)
    assert (lean.name, lean.requests, lean.outcomes) == ("lean", 400, {"in_time": 200, "late": 200})


def test_causes_have_counts_and_retry_hints() -> None:
    lost, refused = report.causes(record_of().columns())
    assert lost == report.Cause("lost", "", 100, Percentiles(), None)
    assert (refused.cause, refused.count, refused.retry_after_p50_ms) == ("RESOURCE_EXHAUSTED queue", 100, 21.0)
    assert refused.latency.p50_ms == pytest.approx(1.0)


def test_number_of_causes_is_limited() -> None:
    record = Record()
    for number in range(3000):
        record.ended(record.sent(0.0, 0.0, 0), 0.1, "failed", f"message {number}")
    causes = Counter(record.columns().cause.tolist())
    assert len(causes) <= 1001
    assert causes["other"] > 1900


def test_timeline_intervals_suit_the_length() -> None:
    found = [report.interval_of(seconds) for seconds in (0.5, 3, 9, 20, 600, 601, 86400)]
    assert found == [0.05, 0.1, 0.2, 1, 1, 10, 1000]


def test_timeline_counts_every_request_once() -> None:
    columns = record_of().columns()
    points = report.timeline(columns, 10.0)
    assert len(points) == 20
    totals = Counter[str]()
    for point in points:
        totals.update(point.outcomes)
    assert totals == columns.counts()
    # Requests of the first half second take up to that long, so answers come in it and in the next.
    assert points[0].p50_ms == pytest.approx(float(np.median([n for n in range(50) if n % 10 < 8])))
    assert sum(point.answers_per_second for point in points) * 0.5 < 800  # the last ones come after the end
    silent = report.timeline(columns.where(columns.due < 1), 10.0)
    assert (silent[-1].outcomes, silent[-1].p50_ms) == ({}, None)


def test_late_generator_raises_doubts() -> None:
    columns = record_of().columns()
    lag = Percentiles.of(columns.lag)
    assert report.doubts(columns, lag, 10.0) == ()
    (late,) = report.doubts(columns, lag, 0.5)
    assert "0.989 ms at p99, of 0.5 ms" in late
    assert [report.lag_bound_ms(deadlines) for deadlines in ((), (0.0,), (0.0, 200.0, 50.0))] == [10, 10, 5]


MEMORY = Memory(10**6, 3 * 10**6, 3 * 10**6, ((0.0, 10**6), (9.5, 3 * 10**6)))


def load_report(record: Record, **options: Any) -> LoadReport:
    """The report of a run with a warm-up of two seconds."""
    facts = {"rate": 100.0, "capacity": 50.0, "warm_up_seconds": 2.0, "interrupted": False, "memory": MEMORY}
    plan = Plan(seconds=8.0, max_lag_ms=0.5)
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


def test_plot_shows_outcomes_deadlines_and_doubts(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        draw(load_report(record_of()), tmp_path / "report.svg")
    svg = (tmp_path / "report.svg").read_text()
    words = ("in time", "late", "refused", "lost", "deadline 50 ms", "p50", "p99", "99", "one, two: poisson")
    assert all(word in svg for word in (*words, "Not to be trusted: the generator itself was late"))
    assert all(COLORS[name] in svg for name in ("in_time", "late", "refused", "lost"))
    assert len(set(COLORS.values())) == len(OUTCOMES) == len(COLORS)


def test_plot_of_a_run_without_responses(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
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


def due(pattern: str, count: int = 20_000, **options: float) -> np.ndarray:
    return np.fromiter(islice(due_times(pattern, RATE, 7, **options), count), float)


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(due("poisson"), prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / RATE, rel=0.02)
    assert gaps.std() == pytest.approx(1 / RATE, rel=0.03)  # of an exponential distribution the mean
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / RATE, rel=0.03)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    counts = np.bincount((due("poisson") * 10).astype(int))[:-1]  # in tenths of a second
    assert counts.mean() == pytest.approx(RATE / 10, rel=0.03)
    assert counts.var() == pytest.approx(RATE / 10, rel=0.15)  # of a Poisson distribution the mean


def test_bursts_keep_the_mean_rate_and_pause_in_between() -> None:
    times = due("burst", burst_period_seconds=2.0, burst_share=0.25)
    assert (np.diff(times) > 0).all()
    assert (times % 2.0).max() < 0.5
    assert len(times) / (times[-1] // 2 * 2) == pytest.approx(RATE, rel=0.03)
    within = np.diff(times)
    within = within[within < 1.0]
    assert within.mean() == pytest.approx(1 / (4 * RATE), rel=0.03)
    assert within.std() == pytest.approx(1 / (4 * RATE), rel=0.05)


def test_invalid_arrivals_are_rejected() -> None:
    for arguments, message in (
        (("sine", 1.0), "one of poisson, constant, burst"),
        (("poisson", 0.0), "--rate: got 0.0"),
        (("poisson", float("nan")), "--rate: got nan"),
        (("poisson", 1.0, 0, -1.0), "--burst-period: got -1.0"),
        (("poisson", 1.0, 0, 1.0, 1.5), "above 0, at most 1"),
    ):
        with pytest.raises(UsageError, match=message):
            due_times(*arguments)


def test_trace_starts_at_zero(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('100.5\n{"at": 101, "who": "someone"}\n\n101\n103.25\n')
    assert list(read_trace(tmp_path / "trace")) == [0.0, 0.5, 0.5, 2.75]


def test_invalid_traces_are_rejected(tmp_path: Path) -> None:
    for text, message in (
        ("", "no times"),
        ("1\n0.5\n", "line 2: got 0.5, expected 1 or later"),
        ("soon\n", "line 1: got soon, expected seconds"),
        ("true\n", "expected seconds"),
        ('{"when": 1}\n', "expected seconds"),
        ("1e999\n", "expected seconds"),
    ):
        (tmp_path / "trace").write_text(text)
        with pytest.raises(UsageError, match=message):
            read_trace(tmp_path / "trace")
    with pytest.raises(UsageError, match="expected a file to read"):
        read_trace(tmp_path / "absent")
