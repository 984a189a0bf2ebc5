"""Continuous batching: requests join and leave a session of their executor between two of its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge.programs.session import IterativeProgram
from edge.scheduling.answers import Answer
from edge.scheduling.batching import nonfinite
from edge.scheduling.job import Job
from edge.scheduling.runs import Runs
from edge.scheduling.tier_executor import TierExecutor


class ContinuousRun:
    """The requests of one executor that a worker computes side by side, step by step.

    Each method returns the jobs that it ended, to be delivered; cancelled ones are among them, without an answer.
    """

    def __init__(self, executor: TierExecutor, runs: Runs, worker: int) -> None:
        assert isinstance(executor.program, IterativeProgram)
        self.executor = executor
        self.jobs: list[Job] = []
        self._program = executor.program
        self._session = self._program.session(executor.options)
        self._runs, self._worker = runs, worker

    @property
    def room(self) -> int:
        """How many more rows the session may have."""
        return max(self.executor.max_rows, 1) - self._session.rows

    def admit(self, jobs: Sequence[Job]) -> list[Job]:
        """Add jobs to the session."""
        ended = self._leave(jobs)
        for job in jobs:
            if job in ended:
                continue
            job.started, begun_ns = True, time.perf_counter_ns()
            job.timings.queue_ns = begun_ns - job.queued_ns
            try:
                self._session.add(job, job.inputs, job.options)
            except BaseException as error:
                self._runs.fail(error, job)
                ended.append(job)
                continue
            job.timings.compute_input_ns += time.perf_counter_ns() - begun_ns
            self.jobs.append(job)
        return ended

    def step(self) -> list[Job]:
        """Compute one step of all jobs; one whose deadline has passed, or that was cancelled, leaves before."""
        ended = self._leave(self.jobs)
        for job in ended:
            self._session.drop(job)
        self.jobs = [job for job in self.jobs if job not in ended]
        if not self.jobs:
            return ended
        rows, size, begun_ns = self._session.rows, sum(job.size for job in self.jobs), time.perf_counter_ns()
        try:
            finished = self._session.step()
        except BaseException as error:
            return [*ended, *self._retry(error)]
        now_ns = time.perf_counter_ns()
        first = self.jobs[0]
        if first.statistics:
            tier, requests = self.executor.tier, len(self.jobs)
            first.statistics.executed(rows, now_ns - begun_ns, tier=tier, requests=requests, size=size)
        for key, computed in finished:
            assert isinstance(key, Job)
            admitted_ns = key.queued_ns + key.timings.queue_ns + key.timings.compute_input_ns
            key.timings.compute_infer_ns = now_ns - admitted_ns
            bad = nonfinite(computed.outputs)
            key.answer = Answer(computed.outputs, computed.facts, bad)
            key.computed_ns, key.batch_rows, key.nonfinite = now_ns, rows, int(bool(bad))
            self.executor.latency.observe(size, key.timings.compute_infer_ns / 1e9, computed.repeats)
            self.jobs.remove(key)
            ended.append(key)
        if finished and self.executor.failures.count:
            self.executor.failures.succeeded()
        for job in self.jobs:
            if job.partials:
                computed = self._session.partial(job)
                if job.partials.put(Answer(computed.outputs, computed.facts)):
                    job.tell(job)
        return ended

    def _leave(self, jobs: Sequence[Job]) -> list[Job]:
        now = time.monotonic()
        late = [job for job in jobs if not job.cancelled and job.deadline is not None and job.deadline <= now]
        for job in late:
            job.expire()
        return [job for job in jobs if job.cancelled or job.error]

    def _retry(self, error: BaseException) -> list[Job]:
        """Compute each job alone after a step has failed, so that only the culprit fails."""
        jobs, self.jobs = self.jobs, []
        self._session = self._program.session(self.executor.options)
        if len(jobs) == 1:
            self._runs.fail(error, jobs[0])
        else:
            self._runs.retry(jobs, self._worker)
        return jobs
