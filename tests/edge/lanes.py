"""Lanes and jobs without a model: what computes is a function, what waits is real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edge.datatypes import Array, TensorSpec
from edge.scheduling.batching import Joiner
from edge.scheduling.job import Job
from edge.scheduling.lane import Computed, Lane
from edge.scheduling.scheduler import Scheduler

WAIT = 60.0

#: Rows of one number each.
VALUES = (TensorSpec("x", "FP32", (-1, 1)),)


def lane_of(work: Callable[[Array], Any], tier: str = "full", **options: Any) -> Lane:
    """A lane whose runs call ``work`` with the joined rows [rows, 1]; what it returns is the output ``y``."""

    def compute(inputs: Any) -> Computed:
        return Computed({"y": work(inputs["x"])})

    return Lane(tier, compute, Joiner(VALUES, {}), **options)


def job_of(lane: Lane, *values: float, **options: Any) -> Job:
    """A request of one row for each value."""
    return Job(lane, {"x": np.array(values, np.float32)[:, None]}, len(values), **options)


def submitted(scheduler: Scheduler, job: Job) -> Job:
    scheduler.submit(job)
    return job


def run(scheduler: Scheduler, work: Callable[[], Any], **options: Any) -> Job:
    """Submit a request that shares its run with no other."""
    return submitted(scheduler, job_of(lane_of(lambda _: work()), 0, **options))


def output(job: Job) -> Any:
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
