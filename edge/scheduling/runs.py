"""Runs: execution of jobs that left the queue, their answers and errors, and the loss of the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from edge.errors import ModelNotReady, Raw
from edge.programs.program import Computed, Options
from edge.runtimes.cuda import fatal
from edge.scheduling.batching import nonfinite, split
from edge.scheduling.job import Job, JobResult
from edge.scheduling.tier_executor import TierExecutor

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """A current run."""

    begun: float  # by ``time.monotonic()``
    executor: TierExecutor
    size: int
    options: Options | None = None  # of a request to an iterative program
    rows: int = 1  # of its requests
    joins: bool = False  # whether requests join an iterative program

    @classmethod
    def of(cls, jobs: Sequence[Job], begun: float) -> Run:
        rows, size = sum(job.rows for job in jobs), sum(job.size for job in jobs)
        return cls(begun, jobs[0].executor, size, jobs[0].options, rows)

    def call_seconds(self, deviations: float) -> float:
        """Predict how long it takes; of an iterative program this step, or this joining, alone."""
        executor = self.executor
        return (executor.join_seconds if self.joins else executor.call_seconds)(self.size, deviations)

    def wait_seconds(self, job: Job, now: float) -> float:
        """Predict how long a job waits for it, on the safe side."""
        return max(self.begun + self.executor.run_seconds(self.size, self.options, self.rows) - now, 0.0)


class Flight(NamedTuple):
    """A started run. Its times are by ``time.perf_counter_ns()``."""

    jobs: list[Job]
    executor: TierExecutor
    size: int
    begun_ns: int  # when joining the inputs began
    joined_ns: int  # when the run started
    end: Callable[[], Computed] | None  # waits for the run; None if its start failed
    on_device: bool  # whether the device computes meanwhile; otherwise ``end`` computes
    added: int = 0  # rows behind those of the jobs


class Runs:
    """Computes the runs of the workers. In its methods, ``worker`` is the index of the worker that calls."""

    def __init__(self, workers: int) -> None:
        self.now: list[Run | None] = [None] * workers  # the current run of each
        self.lost = ""  # why the device is lost, until the process ends; otherwise empty
        self.on_lost: Callable[[], None] = lambda: None  # called once, on the thread that lost the device
        self.free_ns = [0] * workers  # when the last run of each worker ended
        self._samples: list[list[Callable[[], None]]] = [[] for _ in range(workers)]

    def start(self, jobs: Sequence[Job], worker: int) -> Flight | None:
        """Start jobs of one tier in one run, after the current one; return None if all were cancelled or too late."""
        now = time.monotonic()
        alive = [job for job in jobs if not job.leaves(now)]
        if not alive:
            return None
        for job in alive:
            job.started = True
        executor, inputs, size = alive[0].executor, alive[0].inputs, alive[0].size
        idle = self.now[worker] is None
        if idle:
            self.now[worker] = Run(time.monotonic(), executor, size)
        end, on_device, added = None, False, 0
        begun_ns = joined_ns = time.perf_counter_ns()
        try:
            self.check_lost()
            if len(alive) > 1 or executor.assembler.pads_alone:
                inputs = executor.assembler.join([job.inputs for job in alive])
                size = executor.assembler.size(inputs)
                if executor.max_rows:
                    added = len(next(iter(inputs.values()))) - sum(job.rows for job in alive)
                joined_ns = time.perf_counter_ns()
            end = executor.program.start(inputs, alive[0].options)
            on_device = end is not None
            end = end or partial(executor.program.compute, inputs, alive[0].options)
        except BaseException as error:
            self.fail(error, alive)
            if idle:
                self.now[worker] = None
        return Flight(alive, executor, size, begun_ns, joined_ns, end, on_device, added)

    def finish(self, flight: Flight, worker: int) -> list[Job]:
        """Wait for a run, in the order of the starts, and set the answers of its jobs, or the error of its only job.

        Return the jobs of a failed run of several, to :meth:`retry` once no other run is on the device; otherwise none.
        """
        return [] if self._succeeds(flight, worker) or len(flight.jobs) == 1 else flight.jobs

    def retry(self, jobs: list[Job], worker: int) -> None:
        """Run each job of a failed run alone, once, so that only the culprit fails."""
        log.warning("a run of %d requests failed; each is tried alone", len(jobs))
        for job in jobs:
            self.execute(job, worker)

    def execute(self, job: Job, worker: int) -> None:
        """Compute a job in a run of its own."""
        flight = self.start((job,), worker)
        if flight:
            self.finish(flight, worker)

    def learn(self, worker: int) -> None:
        """Add the last runs of a worker to the latency tables, after their answers are on the way."""
        for sample in self._samples[worker]:
            sample()
        self._samples[worker].clear()

    def check(self, error: BaseException) -> None:
        """Record the loss of the device if an error of a GPU's runtime means that."""
        if text := fatal(error):
            self.lose(text)

    def lose(self, reason: str) -> None:
        """Record that nothing can be computed any more."""
        if not self.lost:
            log.critical("nothing can be computed any more: %s", reason)
            self.lost = reason
            self.on_lost()

    def check_lost(self) -> None:
        """Raise a ModelNotReady if nothing can be computed any more."""
        if self.lost:
            raise self.refusal()

    def refusal(self) -> ModelNotReady:
        """Return the error of requests that arrive after the device is lost."""
        fix = "Use another server; this one ends, so that its supervisor can start it again."
        return ModelNotReady("server", given=Raw(self.lost), expected="a device that computes", fix=fix)

    def _succeeds(self, flight: Flight, worker: int) -> bool:
        jobs, executor = flight.jobs, flight.executor
        if flight.end is None:
            return False
        # Before that, the device computed the previous run.
        begun_ns, started_ns = (max(ns, self.free_ns[worker]) for ns in (flight.begun_ns, flight.joined_ns))
        self.now[worker] = self.now[worker] or Run(time.monotonic(), executor, flight.size)
        try:
            self.check_lost()  # while the run was on the device
            computed = flight.end()
        except BaseException as error:
            self.fail(error, jobs)
            return False
        finally:
            self.now[worker] = None
            self.free_ns[worker] = computed_ns = time.perf_counter_ns()
        if executor.failures.count:
            executor.failures.succeeded()
        alone, rows = len(jobs) == 1, [job.rows for job in jobs]
        whole = alone and not flight.added
        try:
            parts = [computed.outputs] if whole else split(computed.outputs, rows, flight.added)
            facts = [computed.facts] if whole else split(computed.facts, rows, flight.added)
            bad = nonfinite(computed.outputs)
        except Exception as error:
            log.exception("the outputs of %s cannot be split among %d requests", executor.model, len(jobs))
            if alone:
                jobs[0].error, jobs[0].computed_ns = error.with_traceback(None), computed_ns
            return False
        split_ns = 0 if whole else time.perf_counter_ns() - computed_ns
        infer_ns, total = computed_ns - started_ns, sum(rows)
        for job, part, fact in zip(jobs, parts, facts, strict=True):
            job.timings.queue_ns = begun_ns - job.queued_ns
            job.timings.compute_input_ns += flight.joined_ns - flight.begun_ns
            job.timings.compute_infer_ns = infer_ns
            job.timings.compute_output_ns = split_ns
            faults = nonfinite({name: part[name] for name in bad}) if bad else ()
            job.finish(JobResult(part, fact, faults), computed_ns, total)
        seconds = (computed_ns - begun_ns) / 1e9
        self._samples[worker].append(partial(executor.latency.observe, flight.size, seconds, computed.repeats))
        if jobs[0].statistics:
            size = flight.size * total // (total + flight.added)
            jobs[0].statistics.executed(total, infer_ns, tier=executor.tier, requests=len(jobs), size=size)
        return True

    def fail(self, error: BaseException, jobs: Sequence[Job]) -> None:
        """Set the error of the only job of a run. That of several is ignored: each of them is tried alone."""
        executor = jobs[0].executor
        if len(jobs) == 1:
            jobs[0].error, jobs[0].computed_ns = error, time.perf_counter_ns()
            executor.failures.failed(error)
        if executor.on_gpu:
            self.check(error)
