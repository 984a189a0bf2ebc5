"""Runs: the inputs of one or several jobs through the model, and to each job its own part of the outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edge.scheduling.batching import split
from edge.scheduling.job import Answer, Job
from edge.scheduling.runs import Runs

log = logging.getLogger(__name__)

#: A job, and what is to be set as its result.
Settled = tuple[Job, Answer]
Forget = Callable[[Job], None]


def execute(jobs: list[Job], worker: int, runs: Runs, forget: Forget) -> list[Settled]:
    """Compute jobs of one lane in one run. If that fails, each is tried alone once, so that only the culprit fails.

    Args:
        jobs: what was taken out of the queue together. The list is empty afterwards: the traceback of an error holds
            the frames around it, and if they held the job, which holds the error, such a circle would keep the
            request's tensors until Python's collector came by.
        worker: who computes them, counted from 0.
        runs: computes them.
        forget: called for each job once nothing is computed for it any more.

    Returns:
        The answers that are still to be given to their jobs. Who waits for one takes the interpreter from this thread,
        so the thread should have nothing more to do by then. Errors have been given already.
    """
    jobs[:] = [job for job in jobs if _begun(job, forget)]
    if len(jobs) > 1:
        settled = _together(jobs, worker, runs, forget)
        if settled is not None:
            jobs.clear()
            return settled
        log.warning("a run of %d requests failed; each is tried alone", len(jobs))
        jobs[:] = [job for job in jobs if not _expired(job, forget)]
    settled = []
    while jobs:
        settled += _alone(jobs, worker, runs, forget)
    return settled


def _begun(job: Job, forget: Forget) -> bool:
    if not job.set_running_or_notify_cancel():
        forget(job)
        return False
    if _expired(job, forget):
        return False
    job.started = True
    return True


def _expired(job: Job, forget: Forget) -> bool:
    if job.deadline is None or job.deadline > time.monotonic():
        return False
    job.expire()
    forget(job)
    return True


def _alone(jobs: list[Job], worker: int, runs: Runs, forget: Forget) -> list[Settled]:
    """Compute the first of some jobs and take it from the list; it has its error, if there is one."""
    lane, inputs = jobs[0].lane, jobs[0].inputs
    begun_ns = time.perf_counter_ns()
    computed = runs.compute(lane, worker, inputs, jobs[0].size)
    job = jobs.pop(0)
    if isinstance(computed, BaseException):
        job.set_exception(computed)
        forget(job)
        del job, computed
        return []
    _note(job, begun_ns, time.perf_counter_ns() - begun_ns, job.rows, forget)
    _learn(job, job.size, job.timings.compute_infer_ns)
    return [(job, Answer(computed.outputs, lane.answered_by(computed.full_rows)))]


def _together(jobs: list[Job], worker: int, runs: Runs, forget: Forget) -> list[Settled] | None:
    """Compute several jobs in one run; None if that failed, and then nothing has happened to them."""
    lane, rows = jobs[0].lane, [job.rows for job in jobs]
    begun_ns = time.perf_counter_ns()
    inputs = lane.joiner.join([job.inputs for job in jobs])
    joined_ns = time.perf_counter_ns()
    size = lane.joiner.size(inputs)
    computed = runs.compute(lane, worker, inputs, size, alone=False)
    computed_ns = time.perf_counter_ns()
    if isinstance(computed, BaseException):
        return None
    try:
        parts = split(computed.outputs, rows)
    except Exception:
        log.exception("the outputs of a run of %d requests cannot be parted", len(jobs))
        return None
    split_ns = time.perf_counter_ns() - computed_ns
    settled, start, total = [], 0, sum(rows)
    for job, part in zip(jobs, parts, strict=True):
        _note(job, begun_ns, computed_ns - joined_ns, total, forget)
        job.timings.compute_input_ns += joined_ns - begun_ns
        job.timings.compute_output_ns = split_ns
        which = None if computed.full_rows is None else computed.full_rows[start : start + job.rows]
        settled.append((job, Answer(part, lane.answered_by(which))))
        start += job.rows
    _learn(jobs[0], size, computed_ns - begun_ns)
    return settled


def _note(job: Job, begun_ns: int, infer_ns: int, batch_rows: int, forget: Forget) -> None:
    job.timings.queue_ns = begun_ns - job.queued_ns
    job.timings.compute_infer_ns = infer_ns
    job.batch_rows = batch_rows
    job.computed_ns = begun_ns + infer_ns
    forget(job)


def _learn(job: Job, size: int, duration_ns: int) -> None:
    """Learn from the run of which a job was the first."""
    job.lane.latency.observe(size, duration_ns / 1e9)
    if job.statistics:
        job.statistics.executed(job.batch_rows, job.timings.compute_infer_ns)
