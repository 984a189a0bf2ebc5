"""Executors and jobs without a model: a function computes the rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from edge.datatypes import Array, TensorSpec
from edge.programs.program import Computed, Program
from edge.repository.model import Model
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.job import Job, JobResult
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor

WAIT = 30.0

#: Rows of one number each.
VALUES = (TensorSpec("x", "FP32", (-1, 1)),)


class Calling(Program):
    """A program that calls a function with the rows [rows, 1]; the result is the output ``y``, and they are a fact."""

    def __init__(self, work: Callable[[Array], Any], repeats: float) -> None:
        self._work = work
        self._repeats = repeats

    def compute(self, inputs: Any, tier: str) -> Computed:
        value = self._work(inputs["x"])
        if not isinstance(value, np.ndarray):
            holder = np.empty((), np.object_)
            holder[()] = value
            value = holder
        return Computed({"y": value}, {"x": inputs["x"][:, 0].copy()}, self._repeats)


def executor_of(
    work: Callable[[Array], Any], tier: str = "full", *, repeats: float = 1.0, **options: Any
) -> TierExecutor:
    return TierExecutor(tier, Calling(work, repeats), BatchAssembler(VALUES, {}), **options)


class Feeds(NamedTuple):
    """The rows of a request, and the inputs of the graph for them."""

    rows: int
    inputs: dict[str, Array]


def prepared(model: Model, arrays: Mapping[str, Array]) -> Feeds:
    return Feeds(model.check_shapes({name: array.shape for name, array in arrays.items()}), model.prepare(arrays))


class Awaited(Job):
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
        """Cancel it; return whether it is dropped, also when it was before."""
        assert self.scheduler
        self.dropped = self.dropped or self.scheduler.cancel(self)
        if self.dropped:
            self._ended.set()
        return self.dropped

    def exception(self, seconds: float = WAIT) -> BaseException | None:
        assert self._ended.wait(seconds)
        return self.take_error()

    def result(self, seconds: float = WAIT) -> JobResult:
        error = self.exception(seconds)
        if self.dropped:
            raise CancelledError
        if error is not None:
            raise error
        assert self.answer is not None
        return self.answer


def job_of(executor: TierExecutor, *values: float, **options: Any) -> Awaited:
    return Awaited(executor, {"x": np.array(values, np.float32)[:, None]}, len(values), **options)


def submitted(scheduler: Scheduler, job: Awaited) -> Awaited:
    job.scheduler = scheduler
    if scheduler.submit(job):
        Awaited.delivered([job])
    return job


def run(scheduler: Scheduler, work: Callable[[], Any], **options: Any) -> Awaited:
    return submitted(scheduler, job_of(executor_of(lambda _: work()), 0, **options))


def output(job: Awaited) -> Any:
    value = job.result(WAIT).outputs["y"]
    return value.item() if value.dtype == np.object_ and value.ndim == 0 else value


@contextmanager
def occupied(scheduler: Scheduler, expected_seconds: float = 0.0) -> Iterator[None]:
    """Keep all workers busy in the block, in runs that the scheduler predicts to take ``expected_seconds``."""
    go = threading.Event()
    holding = []
    for _ in range(scheduler.instances):
        started = threading.Event()

        def hold(rows: Array, started: threading.Event = started) -> Array:
            started.set()
            assert go.wait(WAIT)
            return rows

        executor = executor_of(hold)
        for _ in range(20 if expected_seconds else 0):
            executor.latency.observe(1, expected_seconds)
        holding.append(submitted(scheduler, job_of(executor, 0)))
        assert started.wait(WAIT)
    try:
        yield
    finally:
        go.set()
        for job in holding:
            job.result(WAIT)
