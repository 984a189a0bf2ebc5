"""Latency predictions by size and tier, their correction by missed deadlines, and the failures of a tier."""

import time

import numpy as np
import pytest

from edge.errors import InvalidRequest, RunnerError
from edge.scheduling.latency import LatencyCorrection, LatencyEstimate, LatencyModel
from edge.scheduling.tier_executor import FailureTracker
from tests.support.jobs import executor_of

NEAR = LatencyEstimate(at=0.0, seconds=0.9, left_seconds=1.0)


def table(known, repeats=1.0):
    table = LatencyModel()
    for size, seconds in known.items():
        table.observe(size, seconds, repeats)
    return table


def test_empty_table_predicts_nothing():
    empty, executor = LatencyModel(), executor_of(lambda rows: rows, max_rows=4)
    assert (empty.seconds(1), empty.usual_seconds(1), empty.seconds_per_element()) == (None, None, None)
    assert not empty.is_brief(1, time.monotonic())
    assert (executor.run_seconds(1), executor.seconds(3, 9, 9)) == (0, 0)


def test_each_run_moves_mean_deviation_and_median():
    learnt = table({4: 0.1})
    for run, mean, deviation, median in (
        (None, 0.1, 0.0125, 0.1),
        (0.2, 0.1125, 0.034375, 0.1 * 17 / 16),
        (0.1 * 17 / 16, 0.11171875, 0.02734375, 0.1 * 17 / 16 * 15 / 16),
    ):
        if run:
            learnt.observe(4, run)
        assert learnt.seconds(4) == pytest.approx(mean)
        assert learnt.seconds(4, 2) == pytest.approx(mean + 2 * deviation)
        assert learnt.usual_seconds(4) == pytest.approx(median)
    assert learnt.usual_seconds(100) is None


def test_repeats_are_learnt_apart_from_the_time_of_one():
    learnt = table({16: 0.004}, repeats=2)
    assert (learnt.seconds(16), learnt.seconds_per_element()) == pytest.approx((0.004, 0.004 / 16))
    learnt.observe(16, 0.006, 6)  # of 0.001 s each
    mean, deviation, repeats, repeats_deviation = 0.001875, 0.0004375, 2.5, 1.0
    assert learnt.seconds(16) == pytest.approx(mean * repeats)
    assert learnt.seconds(16, 2) == pytest.approx((mean + 2 * deviation) * (repeats + 2 * repeats_deviation))
    assert learnt.usual_seconds(16) == pytest.approx(0.002 * 15 / 16 * repeats)
    learnt.observe(16, 0.004, 0.5)
    repeats_deviation += (2 - repeats_deviation) / 4
    assert (learnt.seconds(16, 1) or 0) / (learnt.seconds(16) or 1) > (2.25 + repeats_deviation) / 2.25


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(0, 0.1), (1, 0.1), (16, 0.1), (17, 0.1), (18, 0.1125), (32, 0.2), (40, 0.25), (64, 0.4), (70, 0.4), (128, 0.8)],
)
def test_unknown_sizes_are_interpolated_and_above_all_of_them_extrapolated(size, seconds):
    learnt = table({64: 0.4, 16: 0.1})
    expected = pytest.approx(seconds, rel=0.1 if size == 70 else 1e-6)
    assert (learnt.seconds(size), (learnt.seconds(size, 2) or 0) / 1.25) == (expected, expected)


def test_sizes_share_a_bucket_within_an_eighth_of_an_octave():
    learnt = table({1: 0.1, 2: 0.2, 64: 0.4})
    assert [size for size in (1, 2, 3, 58, 59, 69, 70) if learnt.usual_seconds(size) is not None] == [1, 2, 59, 69]
    assert table({1: 0.1, 16: 0.4, 64: 3.2}).seconds_per_element() == pytest.approx(0.025)


def test_runs_are_brief_below_a_limit_unless_one_was_long():
    now = time.monotonic()
    assert [table({1: seconds}).is_brief(1, now) for seconds in (0.000249, 0.00025)] == [True, False]
    learnt = table({1: 1e-5})
    learnt.observe(1, 0.025)
    assert learnt.is_brief(1, now)
    learnt.observe(1, 0.0251)
    assert [learnt.is_brief(1, at) for at in (now + 30, time.monotonic() + 30)] == [False, True]


def test_prediction_of_waiting_requests_adds_up_their_runs():
    joined, alone = executor_of(lambda rows: rows, max_rows=4), executor_of(lambda rows: rows, max_delay_seconds=1.0)
    for size, seconds in ((1, 0.08), (2, 0.16), (4, 0.24)):
        joined.latency.observe(size, seconds)
    alone.latency.observe(1, 0.16)
    alone.latency.observe(3, 0.4)
    assert (joined.run_seconds(4), alone.run_seconds(1)) == pytest.approx((0.3, 0.2))  # two mean deviations
    # One mean deviation for each run of four rows and one of the rest.
    for waiting, expected in (((0, 0, 0), 0), ((3, 8, 8), 0.54), ((9, 9, 9), 0.63), ((1, 6, 6), 0.45)):
        assert joined.seconds(*waiting) == pytest.approx(expected)
    assert joined.seconds(3, 8, 16) == pytest.approx(2 * 0.54)  # two elements in each row
    assert (alone.seconds(3, 3, 3), alone.seconds(2, 2, 6)) == pytest.approx((3 * 0.18, 2 * 0.45))
    assert alone.max_delay_seconds == 0  # nothing could join it


def test_tier_is_suspect_after_three_failures_that_the_request_did_not_cause():
    failures = FailureTracker()
    text = {"given": "g", "expected": "e", "fix": "f"}
    states = []
    for error in (RunnerError("r", **text), InvalidRequest("r", **text), ValueError(), KeyboardInterrupt()):
        failures.failed(error)
        states.append((failures.count, failures.suspect))
    assert states == [(1, False), (1, False), (2, False), (3, True)]
    failures.mark_broken("its golden row fails")
    assert (failures.count, failures.broken) == (3, "its golden row fails")
    failures.succeeded()
    assert (failures.count, failures.broken, failures.suspect) == (0, "", False)
    failures.mark_broken("again")
    assert (failures.count, failures.suspect) == (1, True)


def test_missed_deadlines_raise_the_factor_and_met_ones_lower_it():
    correction = LatencyCorrection()
    correction.answered(1.0, NEAR)  # at the deadline
    assert correction.factor(1.0) == 1.0
    correction.answered(2.0, NEAR)
    assert correction.factor(2.0) == 1.25
    correction.answered(1.0, NEAR)
    assert correction.factor(1.0) == pytest.approx(1.25 * 0.999)
    assert correction.factor(31.0) == pytest.approx(1 + (1.25 * 0.999 - 1) / np.e)  # it decays
    assert correction.factor(1e9) == 1.0


def test_factor_rises_no_further_than_the_predictions_were_wrong():
    correction, later = LatencyCorrection(), NEAR._replace(at=10.0)
    factors = []
    for _ in range(3):
        correction.answered(11.08, later)
        factors.append(correction.factor(11.08))
    assert factors == pytest.approx([1.25, 1.5, 1.5])
    for _ in range(9):
        correction.answered(50.0, NEAR)
    assert correction.factor(50.0) == 2.5
    correction.answered(50.0, NEAR._replace(at=50 - 1.08))
    assert correction.factor(50.0) == 2.5


def test_leaving_the_queue_counts_from_shortly_before_the_deadline():
    correction = LatencyCorrection()
    later = NEAR._replace(at=10.0)
    correction.abandoned(10.994, later)
    assert correction.factor(10.994) == 1.0
    correction.abandoned(10.996, later)
    assert correction.factor(10.996) == 1.25
    correction.answered(10.9, later)
    assert correction.factor(10.9) == pytest.approx(1.25 * 0.999)


def test_estimates_far_below_the_deadline_prove_nothing():
    def factors(seconds):
        """Raise the factor by an estimate, from 1 and from 1.25."""
        fresh, raised = LatencyCorrection(), LatencyCorrection()
        raised.answered(2.0, NEAR)
        for correction in (fresh, raised):
            correction.answered(2.0, LatencyEstimate(0.0, seconds, 1.0))
        return fresh.factor(2.0), raised.factor(2.0)

    expected = {0.5: (1.25, 1.5625), 0.49: (1.0, 1.5625), 0.4: (1.0, 1.5625), 0.39: (1.0, 1.25)}
    assert {seconds: factors(seconds) for seconds in expected} == expected
