"""Jobs side by side, with a line of progress for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from rich.progress import TaskID

from edge.cli.output import progress, remark
from edge.errors import Raw
from export.errors import JobError
from export.training.jobs import Job, Outcome, Run, last_line, open_workers

_LOOK_SECONDS = 1.0


def run_all(
    jobs: Sequence[Job],
    *,
    logs: Path,
    workers: int | None = None,
    ray: str | None = None,
    gpu: bool = False,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Run the unfinished jobs, several at a time, and show the last line of each one's log.

    A failed job does not stop the others. When this returns or raises, on Ctrl-C too, the processes of all jobs have
    ended, and a second call runs the jobs that are still unfinished.

    Args:
        logs: a directory for ``NAME.log``, to which a second run of a job appends.
        workers: the most jobs at a time; None is one for each core, or each GPU, of this machine or the cluster.
        ray: a cluster, as :func:`export.training.jobs.open_cluster` takes it; None is this machine.
        gpu: whether each job gets a GPU, which no other job sees.
        on_outcome: called after each job that was run.

    Raises:
        JobError: some jobs failed; the others are finished.
        UsageError: the cluster cannot be used, or has no GPU.
    """
    assert len({job.name for job in jobs}) == len(jobs), "two jobs would share a log"
    missing = [job for job in jobs if not job.output.exists()]
    if len(missing) < len(jobs):
        remark(f"{len(jobs) - len(missing)} of {len(jobs)} jobs were finished earlier")
    if not missing:
        return
    logs.mkdir(parents=True, exist_ok=True)
    logs = logs.resolve()
    with open_workers(ray, logs, gpu=gpu) as (run, number):
        failed = _run_each(missing, logs, run, workers or number, on_outcome)
    if failed:
        given = Raw(f"{len(failed)} of {len(missing)} that failed: {', '.join(failed)}")
        fix = f"Read their logs in {logs}, and give the same command: it runs what is missing."
        raise JobError("jobs", given=given, expected="all of them to finish", fix=fix)


def _run_each(
    jobs: Sequence[Job], logs: Path, run: Run, workers: int, on_outcome: Callable[[Outcome], None]
) -> list[str]:
    """Run jobs, and return the names of those that failed."""
    stop, failed = threading.Event(), []
    pool = ThreadPoolExecutor(workers)
    try:
        waiting = {pool.submit(_outcome, job, _log(logs, job), run, stop): job for job in jobs}
        with _Lines(len(jobs), logs) as lines:
            while waiting:
                done, _ = wait(waiting, _LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    job, outcome = waiting.pop(future), future.result()
                    if outcome.error:
                        failed.append(job.name)
                        remark(str(outcome.error))
                    on_outcome(outcome)
                    lines.end(job)
                lines.show([job for future, job in waiting.items() if future.running()])
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return failed


def _outcome(job: Job, log: Path, run: Run, stop: threading.Event) -> Outcome:
    started = time.perf_counter()
    try:
        reason = run(job.call, log, stop)
    except OSError as problem:  # such as no memory for another process, or no space for the log
        reason = str(problem)
    if reason is None and not job.output.exists():
        reason = "an end without a result"
    seconds = time.perf_counter() - started
    if reason is None:
        return Outcome(job, seconds, None)
    fix = f"Read {log}, and give the same command again."
    failure = JobError(f"job {job.name}", given=Raw(reason), expected=f"a result in {job.output}", fix=fix)
    return Outcome(job, seconds, failure)


def _log(logs: Path, job: Job) -> Path:
    return logs / f"{job.name}.log"


class _Lines:
    """A line for all jobs, and below it one for each that runs, with the last line of its log."""

    def __init__(self, jobs: int, logs: Path) -> None:
        self._bar, self._logs = progress(), logs
        self._every = self._bar.add_task("jobs", total=jobs, note="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Lines:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def end(self, job: Job) -> None:
        self._bar.advance(self._every)
        if job.name in self._tasks:
            self._bar.remove_task(self._tasks.pop(job.name))

    def show(self, running: Sequence[Job]) -> None:
        for job in running:
            if job.name not in self._tasks:
                self._tasks[job.name] = self._bar.add_task(job.name, total=None, note="")
            self._bar.update(self._tasks[job.name], note=last_line(_log(self._logs, job)))
