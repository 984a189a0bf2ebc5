"""Promises of the scheduler: what broken ones change, and what that is worth on a machine whose speed changes."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np
import pytest

from edge.errors import DeadlineExceeded, Overloaded
from edge.scheduling.drift import Drift, Promise
from edge.scheduling.latency import LatencyTable
from edge.scheduling.scheduler import Scheduler
from tests.support.lanes import WAIT, job_of, lane_of, occupied, submitted

NEAR = Promise(at=0.0, seconds=0.9, left=1.0)


def test_a_broken_promise_raises_the_factor_and_kept_ones_lower_it() -> None:
    drift = Drift()
    assert drift.factor(0.0) == 1.0
    drift.kept(2.0, NEAR)
    raised = drift.factor(2.0)
    assert raised == pytest.approx(1.25)
    for _ in range(50):
        drift.kept(0.5, NEAR)
    assert 1.0 < drift.factor(0.5) < raised
    for _ in range(5000):
        drift.kept(0.5, NEAR)
    assert drift.factor(0.5) == 1.0


def test_the_factor_goes_no_further_than_the_predictions_were_wrong() -> None:
    drift = Drift()
    for _ in range(100):
        drift.kept(1.08, NEAR)
    assert drift.factor(1.08) == pytest.approx(1.25 * 1.2)
    for _ in range(100):
        drift.kept(50.0, NEAR)
    assert drift.factor(50.0) == pytest.approx(2.5)


def test_leaving_the_queue_counts_only_at_the_deadline() -> None:
    drift = Drift()
    drift.left(0.5, NEAR)
    assert drift.factor(0.5) == 1.0
    drift.left(0.999, NEAR)
    assert drift.factor(0.999) == pytest.approx(1.25)


@pytest.mark.parametrize("promise", [None, Promise(at=0.0, seconds=0.1, left=1.0)])
def test_a_promise_that_tells_nothing_changes_nothing(promise: Promise | None) -> None:
    drift = Drift()
    drift.kept(2.0, promise)
    drift.left(2.0, promise)
    assert drift.factor(2.0) == 1.0


def test_without_news_it_is_forgotten() -> None:
    drift = Drift()
    drift.kept(2.0, NEAR)
    assert drift.factor(1e9) == 1.0
    factors = [drift.factor(2.0 + seconds) for seconds in (0, 10, 30, 100)]
    assert factors == sorted(factors, reverse=True)


class _Trusting(Drift):
    """Believes every prediction."""

    def factor(self, now: float) -> float:
        return 1.0


class Outcome(NamedTuple):
    kept: int
    broken: int


def overloaded(drift: Drift, seed: int, seconds: float = 40.0) -> Outcome:
    """Simulate one worker, asked three times what it can do, whose runs take 20 ms or three times as long, by turns.

    No clock is read: all times are the simulation's.
    """
    # One generator for each cause, so that both simulations meet the same machine and the same requests.
    arrivals, speeds, runs = (np.random.default_rng([seed, cause]) for cause in range(3))
    table = LatencyTable()
    waiting: deque[tuple[float, Promise]] = deque()
    running: tuple[float, float, Promise] | None = None  # begun, ends
    usual, deadline, slow, turns_at = 0.02, 0.5, 1.0, 1.0
    table.observe(1, usual)
    now, arrival, kept, broken = 0.0, 0.0, 0, 0
    while now < seconds:
        now = min(arrival, running[1] if running else np.inf, waiting[0][0] if waiting else np.inf)
        while now >= turns_at:
            slow, turns_at = 4.0 - slow, turns_at + speeds.exponential(1.0)
        if running and now == running[1]:
            begun, _, promise = running
            table.observe(1, now - begun)
            drift.kept(now, promise)
            kept, broken = kept + (now - promise.at <= deadline), broken + (now - promise.at > deadline)
            running = None
        elif waiting and now == waiting[0][0]:
            drift.left(now, waiting.popleft()[1])
            broken += 1
        else:
            arrival = now + arrivals.exponential(usual / 3)
            one, two = table.seconds(1, 1) or 0.0, table.seconds(1, 2) or 0.0
            rest = max(running[0] + two - now, 0.0) if running else 0.0
            predicted = rest + len(waiting) * one + two
            if predicted * drift.factor(now) <= deadline:
                waiting.append((now + deadline, Promise(now, predicted, deadline)))
        if not running and waiting:
            _, promise = waiting.popleft()
            running = (now, now + usual * slow * runs.lognormal(-0.125, 0.5), promise)
    return Outcome(kept, broken)


def test_on_a_machine_whose_speed_changes_far_more_promises_are_kept() -> None:
    trusting = [overloaded(_Trusting(), seed) for seed in range(3)]
    learning = [overloaded(Drift(), seed) for seed in range(3)]
    for one, other in zip(trusting, learning, strict=True):
        assert other.broken < one.broken / 3
        assert other.kept > one.kept


def test_the_scheduler_promises_less_when_it_broke_its_promises() -> None:
    scheduler = Scheduler(max_queue_size=64)
    lane = lane_of(lambda rows: rows)
    for _ in range(40):  # until the deviation is nothing
        lane.latency.observe(1, 0.25)

    def wait_in_vain() -> None:
        """Wait for a worker that is believed to be free in time, and is not."""
        job = submitted(scheduler, job_of(lane, 1, deadline=time.monotonic() + 0.4))
        with pytest.raises(DeadlineExceeded):
            job.result(WAIT)

    def until_refused() -> None:
        for _ in range(5):
            wait_in_vain()

    try:
        with occupied(scheduler):
            before = scheduler.finish_seconds(job_of(lane, 1))
            wait_in_vain()
            assert scheduler.finish_seconds(job_of(lane, 1)) > 1.1 * before
            with pytest.raises(Overloaded, match="as predicted"):
                until_refused()
    finally:
        scheduler.close()
