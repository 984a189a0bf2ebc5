"""From rows to a report: counts that add up, exact percentiles, a timeline, and pictures that hold what they should."""

from __future__ import annotations

import math
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
from edge.load.charts import Bars, Line, chart, linear_axis, log_axis
from edge.load.page import COLORS

from edge.load import report
from edge.load.record import OUTCOMES, Record
from edge.load.report import Percentiles
from edge.load.workload import Kind

KINDS = [Kind("one", "", 0, 50.0, False), Kind("two", "", 0, 0.0, True)]


def record_of(count: int = 1000) -> Record:
    """A request each 10 ms; its number says its kind, how it ends, and after how many ms."""
    record = Record()
    for number in range(count):
        row = record.sent(number / 100, number / 1e6, number % 2)
        if number % 10 == 9:
            record.ended(row, 0.001, "refused", "RESOURCE_EXHAUSTED queue", 20.0 + number % 3)
        elif number % 10 != 8:  # every tenth never ends
            record.answered(row, number / 1e3, late=number >= 500, tier="lean" if number % 2 else "")
    return record


def test_a_request_that_never_ends_is_lost_and_all_add_up() -> None:
    columns = record_of().columns()
    assert columns.counts() == {"in_time": 400, "late": 400, "refused": 100, "lost": 100}
    assert sum(columns.counts().values()) == len(columns) == 1000
    assert np.isnan(columns.latency[8])


def test_a_group_for_each_name_that_differs() -> None:
    columns = record_of().columns()
    one, two = report.groups(columns, KINDS, lambda kind: kind.model)
    assert (one.name, one.requests, one.outcomes["lost"]) == ("one", 500, 100)
    assert (two.name, two.requests, two.outcomes["refused"]) == ("two", 500, 100)
    assert one.latency.count == 400
    assert report.groups(columns, KINDS, lambda kind: str(kind.priority)) == ()
    (lean,) = report.tiers(columns)
    assert (lean.name, lean.requests, lean.outcomes) == ("lean", 400, {"in_time": 200, "late": 200})


def test_causes_say_how_many_and_when_to_come_again() -> None:
    lost, refused = sorted(report.causes(record_of().columns()), key=lambda cause: cause.outcome)
    assert (lost.outcome, lost.cause, lost.count, lost.latency.count, lost.retry_after_p50_ms) == (
        "lost",
        "",
        100,
        0,
        None,
    )
    assert (refused.cause, refused.count, refused.retry_after_p50_ms) == ("RESOURCE_EXHAUSTED queue", 100, 21.0)
    assert refused.latency.p50_ms == pytest.approx(1.0)


def test_percentiles_are_exact() -> None:
    values = np.random.default_rng(0).permutation(np.arange(1, 10_001)) / 1e3
    found = Percentiles.of(values)
    assert (found.count, found.max_ms) == (10_000, 10_000)
    assert found.p50_ms == pytest.approx(5000.5)
    assert found.p99_9_ms == pytest.approx(9990.001)
    assert Percentiles.of(values[:0]) == Percentiles(0, 0, 0, 0, 0, 0, 0)


def test_causes_are_bounded() -> None:
    record = Record()
    for number in range(3000):
        record.ended(record.sent(0.0, 0.0, 0), 0.1, "failed", f"message {number}")
    causes = Counter(record.columns().cause.tolist())
    assert len(causes) <= 1001
    assert causes["other"] > 1900


@pytest.mark.parametrize(
    ("seconds", "interval"), [(0.5, 0.05), (3, 0.1), (9, 0.2), (20, 1), (600, 1), (601, 10), (86400, 1000)]
)
def test_a_timeline_has_as_many_points_as_can_be_seen(seconds: float, interval: float) -> None:
    assert report.interval_of(seconds) == interval


def test_a_timeline_counts_every_request_once() -> None:
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


def test_the_curve_ends_where_one_value_is_left() -> None:
    percents, values = zip(*report.curve(np.arange(1, 1001) / 1e3), strict=True)
    assert (percents[0], values[0]) == (0.0, 1.0)
    assert percents[-1] == pytest.approx(99.9)
    assert list(values) == sorted(values)
    assert report.curve(np.zeros(0)) == ()


def test_a_generator_that_was_late_is_doubted() -> None:
    columns = record_of().columns()
    lag = Percentiles.of(columns.lag)
    assert report.doubts(columns, lag, 10.0) == ()
    (late,) = report.doubts(columns, lag, 0.5)
    assert "0.989 ms at p99, of 0.5 ms" in late
    assert [report.lag_bound_ms(deadlines) for deadlines in ((), (0.0,), (0.0, 200.0, 50.0))] == [10, 10, 5]


def test_a_chart_is_xml_and_holds_its_values() -> None:
    figure = chart(
        "a < b",
        linear_axis("seconds", 4.0),
        linear_axis("requests per second", 10.0),
        bars=[Bars("in time", "green", [5.0, 0.0]), Bars("late", "red", [5.0, 2.0])],
        starts=[0.0, 2.0],
        width=2.0,
        lines=[Line("p50", "blue", [(0.0, 0.0), (1.0, math.nan), (4.0, 10.0)])],
        limits=[(5.0, "deadline"), (99.0, "out of sight")],
    )
    root = ElementTree.fromstring(figure)
    green, red, line = [path.attrib["d"] for path in root.iter("path")]
    assert (green.count("Z"), red.count("Z")) == (1, 2)
    assert line.count("M") == 2  # the NaN parts it
    texts = {text.text for text in root.iter("text")}
    assert {"deadline", "seconds", "0", "10"} <= texts
    assert "out of sight" not in texts


@pytest.mark.parametrize(("low", "high"), [(0.3, 70.0), (1.0, 1.0), (4.0, 4.5), (0.02, 30_000.0)])
def test_axes_hold_their_values_between_round_ends(low: float, high: float) -> None:
    for axis in (log_axis("ms", low, high), linear_axis("ms", high)):
        assert axis.low <= high * 1.0001
        assert axis.high >= high * 0.9999
        assert 2 <= len(axis.ticks) <= 9
        places = [axis.share(value) for value, _ in axis.ticks]
        assert places == sorted(places)
        assert 0 <= places[0] <= places[-1] <= 1
    assert log_axis("ms", low, high).low <= low * 1.0001


def test_every_outcome_has_a_color_of_its_own() -> None:
    assert len(set(COLORS.values())) == len(OUTCOMES) == len(COLORS)
