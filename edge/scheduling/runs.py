"""Runs: jobs through their program, each job's part of the result back to it, and the state of the device meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import Literally, ModelNotReady
from edge.programs.program import Computed
from edge.runtimes.device_errors import fatal
from edge.scheduling.batching import split
from edge.scheduling.job import Answer, Job
from edge.scheduling.lane import Lane
from edge.scheduling.latency import LatencyTable

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """A run that has not ended: since when, by ``time.monotonic()``, of which tier, and of what size."""

    begun: float
    lane: Lane
    size: int


class Flight(NamedTuple):
    """A run from its start to its end.

    Attributes:
        jobs: those that it computes.
        lane: their tier.
        size: of their inputs, as the lane's joiner counts it.
        begun_ns: when their inputs began to be joined, by ``time.perf_counter_ns()``.
        joined_ns: when it was started.
        end: waits for it and returns its result; None where its start failed.
        on_device: whether it goes on by itself meanwhile; otherwise ``end`` computes it.
    """

    jobs: list[Job]
    lane: Lane
    size: int
    begun_ns: int
    joined_ns: int
    end: Callable[[], Computed] | None
    on_device: bool


class _RunTime(NamedTuple):
    """What one run shows of the latency of its tier."""

    latency: LatencyTable
    size: int
    seconds: float
    repeats: float


class Runs:
    """Computes runs for the workers, and knows the current run of each.

    Args:
        workers: how many there are.

    Attributes:
        now: the run of each worker, None where it has none.
        lost: why nothing can be computed any more; empty while that is not so. It stays: only a new process helps.
        on_lost: called once, on the thread that lost the device.
        free_ns: when the last run of each worker ended, by ``time.perf_counter_ns()``.
    """

    def __init__(self, workers: int) -> None:
        self.now: list[Run | None] = [None] * workers
        self.lost = ""
        self.on_lost: Callable[[], None] = lambda: None
        self.free_ns = [0] * workers
        self._times: list[list[_RunTime]] = [[] for _ in range(workers)]  # of each worker's last runs, not learnt yet

    def start(self, jobs: Sequence[Job], worker: int) -> Flight | None:
        """Start jobs of one lane in one run; None where all of them were cancelled or too late.

        A device that is still at a run computes this one after it.

        Args:
            jobs: what left the queue together.
            worker: the index of the worker that computes them.
        """
        alive = [job for job in jobs if not job.cancelled and self._begins(job)]
        if not alive:
            return None
        first = alive[0]
        lane, inputs, size = first.lane, first.inputs, first.size
        idle = self.now[worker] is None
        if idle:
            self.now[worker] = Run(time.monotonic(), lane, size)
        end, on_device = None, False
        begun_ns = joined_ns = time.perf_counter_ns()
        try:
            if self.lost:
                raise self.refusal()
            if len(alive) > 1 or lane.joiner.pads_alone:
                inputs = lane.joiner.join([job.inputs for job in alive])
                size = lane.joiner.size(inputs)
                joined_ns = time.perf_counter_ns()
            end = lane.program.start(inputs, first.options)
            on_device = end is not None
            end = end or partial(lane.program.compute, inputs, first.options)
        except BaseException as error:
            self._failed(error, alive)
            if idle:
                self.now[worker] = None
        return Flight(alive, lane, size, begun_ns, joined_ns, end, on_device)

    def finish(self, flight: Flight, worker: int) -> list[Job]:
        """Wait for a run and give its jobs their answers, or their error where it has one job.

        Args:
            flight: what :meth:`start` returned, in the order in which runs were started.
            worker: the same as there.

        Returns:
            The jobs of a run of several that failed, for :meth:`retry` once no other run is on the device; else none.
        """
        return [] if self._ended(flight, worker) or len(flight.jobs) == 1 else flight.jobs

    def retry(self, jobs: list[Job], worker: int) -> None:
        """Try each job of a run that failed alone, once, so that only the culprit fails."""
        log.warning("a run of %d requests failed; each is tried alone", len(jobs))
        for job in jobs:
            self.execute((job,), worker)

    def execute(self, jobs: Sequence[Job], worker: int) -> None:
        """Compute jobs of one lane in one run, or, if that fails, each alone.

        Each has its answer or its error afterwards, but for those that were cancelled before.
        """
        flight = self.start(jobs, worker)
        failed = self.finish(flight, worker) if flight else []
        if failed:
            self.retry(failed, worker)

    def learn(self, worker: int) -> None:
        """Learn from the times of a worker's last runs; nobody has to wait for that."""
        times = self._times[worker]
        for time_ in times:
            time_.latency.observe(time_.size, time_.seconds, time_.repeats)
        times.clear()

    def check(self, error: BaseException) -> None:
        """Find out whether an error of a GPU's runtime means that the device is lost."""
        text = fatal(error)
        if text:
            self.lose(text)

    def lose(self, reason: str) -> None:
        """Note that nothing can be computed any more."""
        if not self.lost:
            log.critical("nothing can be computed any more: %s", reason)
            self.lost = reason
            self.on_lost()

    def refusal(self) -> ModelNotReady:
        """Return the error of requests that find the device lost."""
        fix = "Ask another server; this one ends, so that its supervisor can start it again."
        return ModelNotReady("server", given=Literally(self.lost), expected="a device that computes", fix=fix)

    def _begins(self, job: Job) -> bool:
        """Return whether there is time left for a job; otherwise it has its error."""
        if job.deadline is not None and job.deadline <= time.monotonic():
            job.expire()
            return False
        job.started = True
        return True

    def _ended(self, flight: Flight, worker: int) -> bool:
        """Wait for a run and settle its jobs; False if it failed."""
        jobs, lane = flight.jobs, flight.lane
        if flight.end is None:
            return False
        if self.lost:  # while the run was on the device
            self._failed(self.refusal(), jobs)
            self.now[worker] = None
            return False
        alone = len(jobs) == 1
        # Until then the device was at the run before.
        begun_ns, started_ns = (max(ns, self.free_ns[worker]) for ns in (flight.begun_ns, flight.joined_ns))
        self.now[worker] = self.now[worker] or Run(time.monotonic(), lane, flight.size)
        try:
            computed = flight.end()
        except BaseException as error:
            self._failed(error, jobs)
            return False
        finally:
            self.now[worker] = None
            self.free_ns[worker] = computed_ns = time.perf_counter_ns()
        if lane.failures.count:
            lane.failures.succeeded()
        rows = [job.rows for job in jobs]
        try:
            parts = [computed.outputs] if alone else split(computed.outputs, rows)
            facts = split(computed.facts, rows) if computed.facts and not alone else [computed.facts] * len(jobs)
            bad = nonfinite(computed.outputs)
        except Exception as error:
            log.exception("the outputs of %s cannot be parted among %d requests", lane.model, len(jobs))
            if alone:
                jobs[0].error, jobs[0].computed_ns = error.with_traceback(None), computed_ns
            return False
        split_ns = 0 if alone else time.perf_counter_ns() - computed_ns
        total = sum(rows)
        for job, part, fact in zip(jobs, parts, facts, strict=True):
            self._settle(job, part, fact, begun_ns, computed_ns, bad)
            timings = job.timings
            timings.compute_infer_ns = computed_ns - started_ns
            timings.compute_input_ns += flight.joined_ns - flight.begun_ns
            if not alone:
                timings.compute_output_ns = split_ns
            job.batch_rows = total
        seconds = (computed_ns - begun_ns) / 1e9
        self._times[worker].append(_RunTime(lane.latency, flight.size, seconds, computed.repeats))
        if jobs[0].statistics:
            infer_ns = computed_ns - started_ns
            jobs[0].statistics.executed(total, infer_ns, tier=lane.tier, requests=len(jobs), size=flight.size)
        return True

    def _failed(self, error: BaseException, jobs: list[Job]) -> None:
        """Give an error to the only job of a run. That of several counts for nothing: each of them is tried alone."""
        lane = jobs[0].lane
        if len(jobs) == 1:
            jobs[0].error = error
            jobs[0].computed_ns = time.perf_counter_ns()
        if self.lost:
            return
        if len(jobs) == 1:
            lane.failures.failed(error)
        if lane.on_gpu:
            self.check(error)

    @staticmethod
    def _settle(
        job: Job,
        outputs: dict[str, Array],
        facts: Mapping[str, Array],
        begun_ns: int,
        computed_ns: int,
        bad: tuple[str, ...],
    ) -> None:
        job.timings.queue_ns = begun_ns - job.queued_ns
        job.computed_ns = computed_ns
        if bad:  # in some row of the run
            bad = nonfinite({name: outputs[name] for name in bad})
            job.nonfinite = 1 if bad else 0
        job.answer = Answer(outputs, facts, bad)


def nonfinite(outputs: Mapping[str, Array]) -> tuple[str, ...]:
    """Return the names of the outputs that hold a NaN or an infinity; about 2 µs for a small one."""
    return tuple(
        [
            name
            for name, array in outputs.items()
            if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) != array.size
        ]
    )
