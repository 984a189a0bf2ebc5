"""Lanes and jobs without a model: what computes is a function, what waits is real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edge.datatypes import Array, TensorSpec
from edge.programs.program import Computed, Options
from edge.scheduling.batching import Joiner
from edge.scheduling.job import Answer, Job
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler

WAIT = 60.0

#: Rows of one number each.
VALUES = (TensorSpec("x", "FP32", (-1, 1)),)


def lane_of(work: Callable[[Array], Any], tier: str = "full", **options: Any) -> Lane:
    """A lane whose runs call ``work`` with the joined rows [rows, 1]; what it returns is the output ``y``."""

    return Lane(tier, Calling(work), Joiner(VALUES, {}), **options)


class Calling:
    """A program that calls a function with the rows."""

    def __init__(self, work: Callable[[Array], Any]) -> None:
        self._work = work

    def compute(self, inputs: Any, options: Options) -> Computed:
        return Computed({"y": self._work(inputs["x"])})


class Awaited(Job):
    """A job that a test waits for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, deliver=Awaited.delivered, **options)
        self.done = threading.Event()

    @staticmethod
    def delivered(jobs: Any) -> None:
        for job in jobs:
            job.done.set()

    def result(self, seconds: float) -> Answer:
        assert self.done.wait(seconds)
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer

    def exception(self, seconds: float) -> BaseException | None:
        assert self.done.wait(seconds)
        return self.error


def job_of(lane: Lane, *values: float, **options: Any) -> Awaited:
    """A request of one row for each value."""
    return Awaited(lane, {"x": np.array(values, np.float32)[:, None]}, len(values), **options)


def submitted(scheduler: Scheduler, job: Awaited) -> Awaited:
    if scheduler.submit(job):
        job.done.set()
    return job


def run(scheduler: Scheduler, work: Callable[[], Any], **options: Any) -> Awaited:
    """Submit a request that shares its run with no other."""
    return submitted(scheduler, job_of(lane_of(lambda _: work()), 0, **options))


def output(job: Awaited) -> Any:
    return job.result(WAIT).outputs["y"]


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
