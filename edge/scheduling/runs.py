"""Runs: jobs through their program, each job's part of the result back to it, and the state of the device meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import Literally, ModelNotReady
from edge.programs.program import Computed, Options
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
    """

    def __init__(self, workers: int) -> None:
        self.now: list[Run | None] = [None] * workers
        self.lost = ""
        self.on_lost: Callable[[], None] = lambda: None
        self._times: list[list[_RunTime]] = [[] for _ in range(workers)]  # of each worker's last runs, not learnt yet

    def execute(self, jobs: Sequence[Job], worker: int) -> None:
        """Compute jobs of one lane in one run. If that fails, each is tried alone once, so that only the culprit fails.

        Each job has its answer or its error afterwards, but for those that were cancelled before.

        Args:
            jobs: what left the queue together.
            worker: the index of the worker that computes them.
        """
        alive = [job for job in jobs if not job.cancelled and self._begins(job)]
        if len(alive) == 1:
            self._alone(alive[0], worker)
        elif alive and not self._together(alive, worker):
            log.warning("a run of %d requests failed; each is tried alone", len(alive))
            for job in alive:
                if self._begins(job):
                    self._alone(job, worker)

    def learn(self, worker: int) -> None:
        """Learn from the times of a worker's last runs; nobody has to wait for that."""
        times = self._times[worker]
        for time_ in times:
            time_.latency.observe(time_.size, time_.seconds, time_.repeats)
        times.clear()

    def compute(
        self, lane: Lane, worker: int, inputs: Mapping[str, Array], size: int, *, options: Options, alone: bool = True
    ) -> Computed | BaseException:
        """Run a program; an error is returned, so that its own request gets it and the thread lives on.

        Args:
            lane: the tier.
            worker: the index of the worker that computes it.
            inputs: of the graph.
            size: of them, as the lane's joiner counts it.
            options: how it is computed.
            alone: whether a failure counts against the tier. That of several requests together does not: each is
                repeated alone.
        """
        if self.lost:
            return self.refusal()
        self.now[worker] = Run(time.monotonic(), lane, size)
        try:
            computed = lane.program.compute(inputs, options)
        except BaseException as error:
            if alone:
                lane.failures.failed(error)
            if lane.on_gpu:
                self.check(error)
            return error
        finally:
            self.now[worker] = None
        if lane.failures.count:
            lane.failures.succeeded()
        return computed

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

    def _alone(self, job: Job, worker: int) -> None:
        begun_ns = time.perf_counter_ns()
        computed = self.compute(job.lane, worker, job.inputs, job.size, options=job.options)
        computed_ns = time.perf_counter_ns()
        job.computed_ns = computed_ns
        if isinstance(computed, BaseException):
            job.error = computed
            del computed  # its traceback leads to this frame, which must not hold it in turn
            return
        try:
            bad = nonfinite(computed.outputs)
        except Exception as error:
            log.exception("%s returned outputs that are no arrays", job.lane.model)
            job.error = error.with_traceback(None)
            return
        self._settle(job, computed.outputs, computed.facts, begun_ns, computed_ns, bad)
        job.timings.compute_infer_ns = computed_ns - begun_ns
        job.batch_rows = job.rows
        self._ran(job, worker, job.size, computed_ns - begun_ns, computed.repeats)

    def _together(self, jobs: list[Job], worker: int) -> bool:
        """Compute several jobs in one run; False if that failed, and then nothing has happened to them."""
        first = jobs[0]
        lane, options = first.lane, first.options
        rows = [job.rows for job in jobs]
        begun_ns = time.perf_counter_ns()
        try:
            inputs = lane.joiner.join([job.inputs for job in jobs])
            size = lane.joiner.size(inputs)
            joined_ns = time.perf_counter_ns()
            computed = self.compute(lane, worker, inputs, size, options=options, alone=False)
            computed_ns = time.perf_counter_ns()
            if isinstance(computed, BaseException):
                del computed  # as in _alone
                return False
            parts = split(computed.outputs, rows)
            facts = split(computed.facts, rows) if computed.facts else None
            bad = nonfinite(computed.outputs)
        except Exception:
            log.exception("a run of %d requests cannot be joined or parted", len(jobs))
            return False
        split_ns = time.perf_counter_ns() - computed_ns
        total = sum(rows)
        for index, (job, part) in enumerate(zip(jobs, parts, strict=True)):
            self._settle(job, part, facts[index] if facts else computed.facts, begun_ns, computed_ns, bad)
            timings = job.timings
            timings.compute_infer_ns = computed_ns - joined_ns
            timings.compute_input_ns += joined_ns - begun_ns
            timings.compute_output_ns = split_ns
            job.batch_rows = total
        self._ran(first, worker, size, computed_ns - begun_ns, computed.repeats)
        return True

    def _ran(self, job: Job, worker: int, size: int, duration_ns: int, repeats: float) -> None:
        """Count the run of which a job was the first."""
        self._times[worker].append(_RunTime(job.lane.latency, size, duration_ns / 1e9, repeats))
        if job.statistics:
            job.statistics.executed(job.batch_rows, job.timings.compute_infer_ns)

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
