"""Lanes and jobs without a model: what computes is a function, what waits is real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import numpy as np

from edge.datatypes import Array, TensorSpec
from edge.programs.program import Computed, Options, Program
from edge.scheduling.batching import Joiner
from edge.scheduling.job import Answer, Job
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler

WAIT = 60.0

#: Rows of one number each.
VALUES = (TensorSpec("x", "FP32", (-1, 1)),)


def lane_of(work: Callable[[Array], Any], tier: str = "full", *, repeats: float = 1.0, **options: Any) -> Lane:
    """A lane whose runs call ``work`` with the joined rows [rows, 1]; what it returns is the output ``y``."""

    return Lane(tier, Calling(work, repeats), Joiner(VALUES, {}), **options)


class Calling(Program):
    """A program that calls a function with the rows."""

    def __init__(self, work: Callable[[Array], Any], repeats: float) -> None:
        self._work = work
        self._repeats = repeats

    def compute(self, inputs: Any, options: Options) -> Computed:
        value = self._work(inputs["x"])
        if not isinstance(value, np.ndarray):
            holder = np.empty((), np.object_)
            holder[()] = value
            value = holder
        return Computed({"y": value}, repeats=self._repeats)


class Awaited(Job):
    """A job that a test waits for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, deliver=Awaited.delivered, **options)
        self.scheduler: Scheduler | None = None
        self.dropped = False
        self._ended = threading.Event()

    @staticmethod
    def delivered(jobs: Any) -> None:
        for job in jobs:
            job._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> bool:
        """Cancel it; True when it is dropped, also for a second time."""
        assert self.scheduler
        self.dropped = self.dropped or self.scheduler.cancel(self)
        if self.dropped:
            self._ended.set()
        return self.dropped

    def result(self, seconds: float = WAIT) -> Answer:
        assert self._ended.wait(seconds)
        if self.dropped:
            raise CancelledError
        error = self.take_error()
        if error is not None:
            raise error
        assert self.answer is not None
        return self.answer

    def exception(self, seconds: float = WAIT) -> BaseException | None:
        assert self._ended.wait(seconds)
        return self.take_error()


def job_of(lane: Lane, *values: float, **options: Any) -> Awaited:
    """A request of one row for each value."""
    return Awaited(lane, {"x": np.array(values, np.float32)[:, None]}, len(values), **options)


def submitted(scheduler: Scheduler, job: Awaited) -> Awaited:
    job.scheduler = scheduler
    if scheduler.submit(job):
        Awaited.delivered([job])
    return job


def run(scheduler: Scheduler, work: Callable[[], Any], **options: Any) -> Awaited:
    """Submit a request that shares its run with no other."""
    return submitted(scheduler, job_of(lane_of(lambda _: work()), 0, **options))


def output(job: Awaited) -> Any:
    value = job.result(WAIT).outputs["y"]
    return value.item() if value.dtype == np.object_ and value.ndim == 0 else value


@contextmanager
def occupied(scheduler: Scheduler, expected_seconds: float = 0.0) -> Iterator[None]:
    """Keep all workers busy while the block runs, so that what the block submits has to wait.

    Args:
        scheduler: whose workers.
        expected_seconds: what the scheduler shall believe that this takes.
    """
    go = threading.Event()
    holding = []
    for _ in range(scheduler.instances):
        started = threading.Event()

        def hold(rows: Array, started: threading.Event = started) -> Array:
            started.set()
            assert go.wait(WAIT)
            return rows

        lane = lane_of(hold)
        if expected_seconds:
            for _ in range(20):
                lane.latency.observe(1, expected_seconds)
        holding.append(submitted(scheduler, job_of(lane, 0)))
        assert started.wait(WAIT)
    try:
        yield
    finally:
        go.set()
        for job in holding:
            job.result(WAIT)
