"""Overlap: while a run is on the device, the scheduler prepares the next one and starts it behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from edge.datatypes import Array
from edge.programs.program import Computed, Options, Program
from edge.scheduling.batching import Joiner
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler
from tests.support.lanes import VALUES, WAIT, Awaited, job_of, occupied, output, submitted

RUN_SECONDS = 0.02


class Accelerator(Program):
    """A device that computes one run after the other by itself; it fails where a row is negative.

    Attributes:
        events: what happened, in order: "start" or "end" and the values of the run.
        most: how many runs were on the device at once.
    """

    def __init__(self, fails_at: str = "end", run_seconds: float = RUN_SECONDS) -> None:
        self.events: list[tuple[str, list[float]]] = []
        self.most = 0
        self._fails_at = fails_at
        self._run_seconds = run_seconds
        self._pending: list[list[float]] = []
        self._free_at = 0.0

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        raise AssertionError("a run that can be started is started")

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed]:
        rows = inputs["x"]
        values = rows[:, 0].tolist()
        self._check(rows, "start")
        self._free_at = end = max(time.monotonic(), self._free_at) + self._run_seconds
        self._pending.append(values)
        self.most = max(self.most, len(self._pending))
        self.events.append(("start", values))

        def result() -> Computed:
            assert self._pending.pop(0) == values, "results are taken in the order of the starts"
            time.sleep(max(end - time.monotonic(), 0))
            self.events.append(("end", values))
            self._check(rows, "end")
            return Computed({"y": rows * 2})

        return result

    def _check(self, rows: Array, where: str) -> None:
        if self._fails_at == where and (rows < 0).any():
            raise ValueError("a negative row")


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(max_queue_size=64)
    yield scheduler
    scheduler.close()


def lane_of(accelerator: Accelerator, max_rows: int = 0) -> Lane:
    return Lane("full", accelerator, Joiner(VALUES, {}), max_rows=max_rows, on_gpu=True)


def queued(scheduler: Scheduler, lane: Lane, values: list[float]) -> list[Awaited]:
    with occupied(scheduler):
        return [submitted(scheduler, job_of(lane, value)) for value in values]


def test_the_next_run_starts_before_the_last_one_ends(scheduler: Scheduler) -> None:
    accelerator = Accelerator()
    lane = lane_of(accelerator)
    numbers = [float(number) for number in range(10)]
    jobs = queued(scheduler, lane, numbers)
    assert [output(job).item() for job in jobs] == [2 * number for number in numbers]
    ends = [values for event, values in accelerator.events if event == "end"]
    assert ends == [[number] for number in numbers]  # in the order of their requests
    # The scheduler has to learn first how long a run takes.
    assert accelerator.events.index(("start", [8.0])) < accelerator.events.index(("end", [7.0]))
    assert accelerator.most == 2
    # The time that a run waited for the device is none of its own.
    took = [job.timings.compute_infer_ns / 1e9 for job in jobs]
    assert np.median(took) == pytest.approx(RUN_SECONDS, rel=0.5)


def test_requests_may_join_a_run_until_shortly_before_it_starts(scheduler: Scheduler) -> None:
    accelerator = Accelerator(run_seconds=0.2)
    lane = lane_of(accelerator, max_rows=2)
    for _ in range(20):
        lane.latency.observe(2, 0.2)
    jobs = queued(scheduler, lane, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert output(jobs[0]).item() == 0  # from now on a run has another one behind it, and 4 waits alone
    jobs.append(submitted(scheduler, job_of(lane, 5.0)))
    assert [output(job).item() for job in jobs] == [0, 2, 4, 6, 8, 10]
    assert ("start", [4.0, 5.0]) in accelerator.events


def test_the_sleep_before_a_run_does_not_lengthen_what_it_is_predicted_from(scheduler: Scheduler) -> None:
    lane = lane_of(Accelerator(run_seconds=0.005))
    for _ in range(3):
        for job in queued(scheduler, lane, [float(number) for number in range(50)]):
            output(job)
    assert (lane.latency.usual_seconds(1) or 0) < 0.05  # it would be 30 s


@pytest.mark.parametrize("fails_at", ["start", "end"])
def test_a_failed_run_harms_no_other(scheduler: Scheduler, fails_at: str) -> None:
    lane = lane_of(Accelerator(fails_at), max_rows=2)
    values = [0.0, 1.0, 2.0, 3.0, 4.0, -5.0, 6.0, 7.0, 8.0, -9.0]
    jobs = queued(scheduler, lane, values)
    for value, job in zip(values, jobs, strict=True):
        if value < 0:
            assert str(job.exception(WAIT)) == "a negative row"
        else:
            assert output(job).item() == 2 * value
    assert lane.failures.count == 1  # the last one; a success in between has ended the first count


def test_the_servers_own_work_waits_for_no_more_than_two_runs(scheduler: Scheduler) -> None:
    accelerator = Accelerator()
    jobs = queued(scheduler, lane_of(accelerator), [float(number) for number in range(20)])
    output(jobs[3])
    events = scheduler.call(lambda: list(accelerator.events))
    assert len(events) <= 16
    assert [event for event, _ in events].count("start") == [event for event, _ in events].count("end")
    for job in jobs:
        output(job)


def test_the_end_of_the_device_ends_the_runs_on_it(scheduler: Scheduler) -> None:
    class Dying(Accelerator):
        def _check(self, rows: Array, where: str) -> None:
            if where == "end" and (rows < 0).any():
                raise RuntimeError("cuStreamSynchronize failed: an illegal memory access was encountered")

    jobs = queued(scheduler, lane_of(Dying()), [0.0, 1.0, 2.0, -3.0, 4.0, 5.0])
    failed = [job.exception(WAIT) for job in jobs]
    assert failed[:3] == [None] * 3
    assert all(failed[3:])
    assert "illegal memory access" in scheduler.runs.lost
