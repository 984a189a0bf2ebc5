"""Continuous batching: requests join and leave a session of their executor between two of its steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from edge.programs.program import Computed, Finished, Joining, Session
from edge.protocol import BY_DEADLINE
from edge.scheduling.batching import nonfinite, split
from edge.scheduling.job import MOST_PARTIAL_ANSWERS, Job, JobResult
from edge.scheduling.runs import Run, Runs
from edge.scheduling.tier_executor import LoopExecutor

log = logging.getLogger(__name__)

#: The times of so many steps of one size are learnt together.
_TIMED_STEPS = 16


class ContinuousRun:
    """The requests of one executor that a worker computes side by side, step by step.

    :meth:`admit` and :meth:`step` return the jobs that they ended, to be delivered; cancelled ones are without an
    answer.
    """

    def __init__(self, executor: LoopExecutor, runs: Runs, worker: int, return_seconds: Callable[[], float]) -> None:
        self.executor = executor
        self._program = executor.program
        self._runs, self._worker, self._return_seconds = runs, worker, return_seconds
        self._batch = _Batch(self._session(), executor)
        self._timed_size = self._timed_ns = self._timed_steps = 0
        self._suspects: list[_Batch] = []  # after a step has failed, each of its jobs, so that only the culprit fails

    @property
    def jobs(self) -> list[Job]:
        return [job for batch in self._batches for job in batch.jobs]

    @property
    def room(self) -> int:
        """How many more rows may join."""
        return max(self.executor.max_rows, 1) - sum(batch.session.rows for batch in self._batches)

    def wait_seconds(self, job: Job, now: float) -> float:
        """Predict how long a job waits for it: until there is room for its rows, and at least for a step."""
        step, every = self.executor.call_seconds(self._batch.size), self._program.loops_per_step
        if job.executor is not self.executor or job.rows <= self.room:
            return step
        left = 0.0  # loops of rows
        for batch in self._batches:
            for other, joined in list(batch.jobs.items()):
                left += other.rows * self.executor.repeats_left(other.options, (batch.steps - joined.steps) * every)
        return step * max(left / max(self.executor.max_rows, 1) / every, 1.0)

    def admit(self, jobs: Sequence[Job]) -> list[Job]:
        now = time.monotonic()
        ended = [job for job in jobs if job.leaves(now)]
        staying = [job for job in jobs if job not in ended]
        alike: dict[Hashable, list[Job]] = {}
        for job in staying:
            alike.setdefault(job.shapes, []).append(job)
        for joining in alike.values():
            ended += self._add(joining, self._batch)
        return ended

    def step(self) -> list[Job]:
        """Compute one step of all jobs, without those that were cancelled or whose deadline has passed."""
        ended, now = [], time.monotonic()
        for batch in self._batches if self._suspects else (self._batch,):
            # Most have no deadline, and this runs for every step.
            asked = [job for job in batch.jobs if job.cancelled or job.deadline is not None]
            for job in asked:
                if job in batch.jobs and self._leaves(job, batch, now):
                    ended += [job, *self._drop(job, batch)]
            if batch.jobs:
                ended += self._step(batch, now)
        if self._suspects:
            self._suspects = [batch for batch in self._suspects if batch.jobs]
        return ended

    @property
    def _batches(self) -> list[_Batch]:
        return [self._batch, *self._suspects]

    def _session(self) -> Session:
        return self._program.session(self.executor.options)

    def _add(self, jobs: Sequence[Job], batch: _Batch) -> list[Job]:
        """Add jobs of equal shapes together or, if that fails, one by one; return those that ended instead."""
        for job in jobs:
            job.started = True
        self._runs.now[self._worker] = Run(time.monotonic(), self.executor, sum(job.size for job in jobs), joins=True)
        begun_ns = time.perf_counter_ns()
        try:
            self._runs.check_lost()
            size, finished = batch.add(jobs)
        except BaseException as error:
            self._runs.fail(error, jobs)
        else:
            rows, now_ns = sum(job.rows for job in jobs), time.perf_counter_ns()
            self.executor.joins.observe_step(size, (now_ns - begun_ns) / 1e9)
            if jobs[0].statistics:
                tokens = rows if self._program.generates else 0
                jobs[0].statistics.joined(self.executor.tier, now_ns - begun_ns, tokens)
            ended = self._finished(finished, batch, now_ns, rows)
            for job in ended:
                if job.statistics and job.answer:  # no step will count it
                    job.statistics.ended_between_steps(self.executor.tier)
            return [*ended, *self._publish(batch, [job for job in batch.streamed if job in jobs])]
        finally:
            self._runs.now[self._worker] = None
        if len(jobs) == 1:
            return [*jobs]
        log.warning("%d requests to %s could not join together; each is tried alone", len(jobs), self.executor.model)
        now = time.monotonic()
        return [ended for job in jobs for ended in ([job] if job.leaves(now) else self._add([job], batch))]

    def _step(self, batch: _Batch, now: float) -> list[Job]:
        rows, size, first = batch.session.rows, batch.size, next(iter(batch.jobs))
        self._runs.now[self._worker] = Run(now, self.executor, size)
        begun_ns = time.perf_counter_ns()
        try:
            self._runs.check_lost()
            finished = batch.step()
        except BaseException as error:
            return self._failed(error, batch)
        finally:
            self._runs.now[self._worker] = None
        now_ns = time.perf_counter_ns()
        self._learn(size, now_ns - begun_ns)
        if first.statistics:  # each request counts once, at its end
            tier, requests = self.executor.tier, sum(not job.error for job in finished)
            first.statistics.executed(rows, now_ns - begun_ns, tier=tier, requests=requests, size=size)
        if finished:
            self._learn_timed()
        ended = self._finished(finished, batch, now_ns, rows)
        return [*ended, *self._publish(batch, batch.streamed)]

    def _publish(self, batch: _Batch, streamed: Sequence[Job]) -> list[Job]:
        """Give jobs with partial answers their outputs so far, or their new text; return those that ended instead.

        The latest outputs replace the oldest ones of a slow reader; new text waits until there is room.
        """
        ended = []
        for job in streamed:
            if job not in batch.jobs:  # it began anew, because another one could not be dropped
                continue
            assert job.partials is not None
            if self._program.generates and len(job.partials) == MOST_PARTIAL_ANSWERS:
                continue
            try:
                computed = batch.session.partial(job)
            except Exception as error:
                self._runs.fail(error, [job])
                ended += [job, *self._drop(job, batch)]
                continue
            if computed:
                job.partials.append(JobResult(computed.outputs, computed.facts))
                if len(job.partials) == 1:
                    job.publish(job)
        return ended

    def _finished(self, finished: Sequence[Finished], batch: _Batch, now_ns: int, rows: int) -> list[Job]:
        """Set the answers or errors of jobs that have left the session after a run of so many rows; return them."""
        ended = []
        for key, computed, error in finished:
            assert isinstance(key, Job)
            ended.append(key)
            joined = batch.remove(key)
            if error:
                self._runs.fail(error, [key])
                continue
            self.executor.learn(key.options, computed.repeats)
            _finish(key, joined, computed, now_ns, rows)
            if self.executor.failures.count:
                self.executor.failures.succeeded()
        return ended

    def _leaves(self, job: Job, batch: _Batch, now: float) -> bool:
        if job.best_effort and job.deadline is not None and not job.cancelled:
            if now + self.executor.call_seconds(batch.size) + self._return_seconds() <= job.deadline:
                return False
            computed = batch.session.partial(job, BY_DEADLINE)
            if not computed:
                return job.leaves(now)
            if now < job.deadline:
                job.estimate = None  # whatever was predicted, an answer that is cut ends in time
            _finish(job, batch.jobs[job], computed, time.perf_counter_ns(), batch.session.rows)
            if job.statistics:
                job.statistics.ended_between_steps(self.executor.tier)
            return True
        return job.leaves(now)

    def _drop(self, job: Job, batch: _Batch) -> list[Job]:
        """Remove a job; return others that ended, because they could not begin anew after the device had failed."""
        batch.remove(job)
        try:
            batch.session.drop(job)
        except BaseException as error:
            if self.executor.on_gpu:
                self._runs.check(error)
            return self._begin_anew(batch)
        return []

    def _learn(self, size: int, step_ns: int) -> None:
        """Learn the time of a step, with that of others of its size, because learning takes microseconds."""
        if self._timed_steps and (size != self._timed_size or self._timed_steps == _TIMED_STEPS):
            self._learn_timed()
        self._timed_size = size
        self._timed_ns += step_ns
        self._timed_steps += 1

    def _learn_timed(self) -> None:
        seconds = self._timed_ns / 1e9 / self._timed_steps / self._program.loops_per_step
        self.executor.latency.observe_step(self._timed_size, seconds)
        self._timed_ns = self._timed_steps = 0

    def _failed(self, error: BaseException, batch: _Batch) -> list[Job]:
        jobs = list(batch.jobs)
        self._runs.fail(error, jobs)
        if len(jobs) > 1:
            return self._begin_anew(batch)
        batch.remove(jobs[0])
        batch.session = self._session()
        return jobs

    def _begin_anew(self, batch: _Batch) -> list[Job]:
        """Give each job of a batch that failed a session of its own; return the jobs that could not begin."""
        jobs = list(batch.jobs)
        for job in jobs:
            batch.remove(job)
        batch.session = self._session()
        log.warning("a session of %d requests to %s failed; each begins anew, alone", len(jobs), self.executor.model)
        ended = []
        for job in jobs:
            alone = _Batch(self._session(), self.executor)
            ended += self._add([job], alone)
            if alone.jobs:
                self._suspects.append(alone)
        return ended


class Worker:
    """A thread that computes. Its inbox takes runs and the server's own work; None ends it, [] makes it wake up."""

    def __init__(self, index: int, main: Callable[[Worker], None]) -> None:
        self.index = index
        self.inbox: SimpleQueue[list[Job] | Callable[[], None] | None] = SimpleQueue()
        self.run: Run | None = None  # the last one
        self.replaced = False  # whether another thread computes in its place
        self.continuous: tuple[ContinuousRun, ...] = ()  # its current ones, of different executors
        self.jobs: list[Job] = []  # in its runs now
        self.stepped: list[Job] = []  # in its continuous runs now
        self.busy = False  # whether its last run was followed by another one without a pause
        self.start_seconds = 0.0  # mean time that the start of a run takes
        self.thread = threading.Thread(target=main, args=(self,), name=f"device-{index}", daemon=True)


class _Joined(NamedTuple):
    """How a job joined a session."""

    steps: int  # of the session before
    begun_ns: int
    done_ns: int


class _Batch:
    """A session and its jobs."""

    def __init__(self, session: Session, executor: LoopExecutor) -> None:
        self.session, self._executor = session, executor
        self.steps = 0
        self.jobs: dict[Job, _Joined] = {}
        self.streamed: list[Job] = []  # those with partial answers
        self._row_size = 0  # of the longest, to which shorter ones are padded

    @property
    def size(self) -> int:
        """The elements of a step."""
        rows = self.session.rows
        return self._executor.call_size(rows, rows * self._row_size)

    def add(self, jobs: Sequence[Job]) -> tuple[int, list[Finished]]:
        """Add jobs of equal shapes; return the elements of their inputs, with padding, and those that have ended."""
        begun_ns = time.perf_counter_ns()
        inputs, assembler, size = [job.inputs for job in jobs], self._executor.assembler, jobs[0].size
        if len(jobs) > 1 or assembler.pads_alone:
            together = assembler.join(inputs)  # all padded to one length
            size, inputs = assembler.size(together), list(split(together, [job.rows for job in jobs]))
        joining = [
            Joining(job, request, job.options, job.handed_out) for job, request in zip(jobs, inputs, strict=True)
        ]
        finished = self.session.add(joining)
        joined = _Joined(self.steps, begun_ns, time.perf_counter_ns())
        for job in jobs:
            self.jobs[job] = joined
            self._row_size = max(self._row_size, job.size // job.rows)
            if job.partials is not None:
                self.streamed.append(job)
        return size, finished

    def remove(self, job: Job) -> _Joined:
        joined = self.jobs.pop(job)
        self.streamed = [other for other in self.jobs if other.partials is not None]
        self._row_size = max((other.size // other.rows for other in self.jobs), default=0)
        return joined

    def step(self) -> list[Finished]:
        finished = self.session.step()
        self.steps += 1
        return finished


def _finish(job: Job, joined: _Joined, computed: Computed, now_ns: int, rows: int) -> None:
    job.timings.queue_ns = joined.begun_ns - job.queued_ns
    job.timings.compute_input_ns += joined.done_ns - joined.begun_ns
    job.timings.compute_infer_ns = now_ns - joined.done_ns
    job.finish(JobResult(computed.outputs, computed.facts, nonfinite(computed.outputs)), now_ns, rows)
