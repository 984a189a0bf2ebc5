"""Executors and jobs without a model: a function computes the rows."""

import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array, TensorSpec
from edge.programs.program import Computed, Program
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.job import Job
from edge.scheduling.tier_executor import TierExecutor

WAIT = 30.0

#: Rows of one number each.
VALUES = (TensorSpec("x", "FP32", (-1, 1)),)


class Calling(Program):
    """A program that calls a function with the rows [rows, 1]; the result is the output ``y``, and they are a fact."""

    def __init__(self, work, repeats):
        self._work = work
        self._repeats = repeats

    def compute(self, inputs, tier):
        value = self._work(inputs["x"])
        if not isinstance(value, np.ndarray):
            holder = np.empty((), np.object_)
            holder[()] = value
            value = holder
        return Computed({"y": value}, {"x": inputs["x"][:, 0].copy()}, self._repeats)


class Overlapping(Program):
    """Its device computes a run, by ``wait``, while the host prepares the next one; its output is the input."""

    def __init__(self, wait=lambda: None):
        self._wait = wait

    def compute(self, inputs, options):
        return self.start(inputs, options)()

    def start(self, inputs, options):
        def end():
            self._wait()
            return Computed({"y": inputs["x"]})

        return end


def executor_of(work, tier="full", *, repeats=1.0, **options):
    return TierExecutor(tier, Calling(work, repeats), BatchAssembler(VALUES, {}), **options)


class Feeds(NamedTuple):
    """The rows of a request, and the inputs of the graph for them."""

    rows: int
    inputs: dict[str, Array]


def prepared(model, arrays):
    return Feeds(
        model.check_shapes({name: array.shape for name, array in arrays.items()}), model.prepare(arrays).tensors
    )


class Awaited(Job):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, deliver=Awaited.delivered, **options)
        self.scheduler = None
        self.dropped = False
        self._ended = threading.Event()

    @staticmethod
    def delivered(jobs):
        for job in jobs:
            job._ended.set()

    def done(self):
        return self._ended.is_set()

    def cancel(self):
        """Cancel it; return whether it is dropped, also when it was before."""
        assert self.scheduler
        self.dropped = self.dropped or self.scheduler.cancel(self)
        if self.dropped:
            self._ended.set()
        return self.dropped

    def exception(self, seconds=WAIT):
        assert self._ended.wait(seconds)
        return self.take_error()

    def result(self, seconds=WAIT):
        error = self.exception(seconds)
        if self.dropped:
            raise CancelledError
        if error is not None:
            raise error
        assert self.answer is not None
        return self.answer


def job_of(executor, *values, **options):
    return Awaited(executor, {"x": np.array(values, np.float32)[:, None]}, len(values), **options)


def submitted(scheduler, job):
    job.scheduler = scheduler
    if scheduler.submit(job):
        Awaited.delivered([job])
    return job


def run(scheduler, work, **options):
    return submitted(scheduler, job_of(executor_of(lambda _: work()), 0, **options))


def output(job):
    value = job.result(WAIT).outputs["y"]
    return value.item() if value.dtype == np.object_ and value.ndim == 0 else value


@contextmanager
def occupied(scheduler, expected_seconds=0.0):
    """Keep all workers busy in the block, in runs that the scheduler predicts to take ``expected_seconds``."""
    go = threading.Event()
    holding = []
    for _ in range(scheduler.instances):
        started = threading.Event()

        def hold(rows, started=started):
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
