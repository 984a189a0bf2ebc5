"""Scheduler of requests on worker threads.

A request that finds a worker idle is given to it, or computed on the submitting thread in its place, if the run ends
sooner than the worker would wake up. Others wait in one bounded queue; those that may share a run are taken together.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty
from types import MappingProxyType
from typing import TypeVar

from edge.scheduling.admission import Admission
from edge.scheduling.continuous import ContinuousRun, Worker
from edge.scheduling.job import Job, deliver, expired
from edge.scheduling.queue import JobQueue
from edge.scheduling.runs import Flight, Run, Runs
from edge.scheduling.tier_executor import LoopExecutor, TierExecutor

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_MAX_QUEUE_BYTES = 256 * 1024**2
#: Weight of a new sample in the mean time that the start of a run takes.
_START_WEIGHT = 1 / 8
#: The next run is taken after this part of the current one, and earlier by twice the time that its start takes. A run
#: that ends during the sleep before is measured too long; well below 1, such errors shrink from run to run.
_TAKEN_AT, _STARTS_EARLY = 0.75, 2.0
#: A sleep takes up to 0.1 ms longer than requested.
_SHORTEST_SLEEP_SECONDS = 0.0005


class Scheduler:
    """Runs jobs on worker threads, one for each of ``instances``; worker 0 owns a GPU.

    With ``admission``, requests that would miss their deadline are rejected. With ``device_bound``, runners belong to
    the thread that loads them; otherwise the server's own work runs on the calling thread, and delays no request.
    """

    def __init__(
        self,
        max_queue_size: int,
        *,
        max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES,
        instances: int = 1,
        admission: bool = True,
        device_bound: bool = True,
    ) -> None:
        self.instances = instances
        self.runs = Runs(instances)
        self.runs.on_lost = self._refuse_all
        self.queue = JobQueue(max_queue_size, max_queue_bytes)
        self._admission = Admission(self.queue, instances, admission)
        self._device_bound, self._closing = device_bound, False
        self._lock = threading.Lock()
        self._alarm, self._alarm_at = threading.Condition(self._lock), math.inf
        self._workers = [Worker(index, self._guard) for index in range(instances)]
        self._idle = self._workers[:]
        self._timer = threading.Thread(target=self._guard, name="expiry", daemon=True)
        for thread in (self._timer, *(worker.thread for worker in self._workers)):
            thread.start()

    def submit(self, job: Job) -> bool:
        """Run a job now if a worker is idle, otherwise queue it; return whether it has ended, and is not delivered.

        Raise a ModelNotReady if the device is lost, a DeadlineExceeded if it is late already, and an Overloaded if the
        queue is full, or if it is predicted to be late.
        """
        now = time.monotonic()
        if job.deadline is not None and job.deadline <= now:
            raise expired(time.perf_counter_ns() - job.queued_ns)
        with self._lock:
            self.runs.check_lost()
            if not self._runs_at_once(job.executor):
                self._enqueue(job, now)
                return False
            worker = self._idle.pop()
            worker.replaced = not self._device_bound and job.executor.is_brief(job.size, now)
            if not worker.replaced:
                self._assign(worker, [job], now)
                return False
        try:
            self.runs.execute(job, worker.index)
            self._settle((job,), worker)
        finally:
            if self._next(worker, returned=True) is not None:
                worker.inbox.put([])  # a request waits for others to join it; the worker has to wake up for it
        return True

    def cancel(self, job: Job) -> bool:
        """Drop a job, and return whether it was still waiting; one whose run has begun is computed and delivered."""
        job.cancelled = True
        with self._lock:
            waited = self.queue.remove(job)
            if waited:
                self._wake()
                if job.estimate:
                    self._admission.correction.abandoned(time.monotonic(), job.estimate)
        if waited:  # otherwise a worker has it
            self.forget(job)
        return waited

    def finish_seconds(self, job: Job) -> float:
        """Predict the seconds until a job is answered that is submitted now; unknown run times count as 0."""
        with self._lock:
            if self._runs_at_once(job.executor):
                return job.executor.run_seconds(job.size, job.options, job.rows) + self._admission.return_seconds
            return self._admission.finish_seconds(job, time.monotonic(), self._current_runs())

    def call(self, work: Callable[[], T]) -> T:
        """Do work of the server itself, such as loading a model, before waiting requests; it is never rejected."""
        if not self._device_bound:
            return work()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # the caller gets any error, and the thread lives on
                self.runs.check(error)
                future.set_exception(error)

        owner = self._workers[0]
        with self._lock:
            if owner in self._idle:
                self._idle.remove(owner)
                self._wake()
            owner.inbox.put(run)
        return future.result()

    def returned(self, seconds: float) -> None:
        """Learn how long an answer took from the end of its run to the transport; a busy transport is a queue too."""
        self._admission.returns.observe(1, seconds)

    def forget(self, job: Job) -> None:
        """Release the inputs and the model of a job that will not run any more; repeating it has no effect."""
        holds, job.inputs, job.holds = job.holds, {}, ()
        for hold in holds:
            hold.give_back()

    def close(self) -> None:
        """Finish the waiting jobs, then stop the threads."""
        with self._lock:
            self._closing = True
            self._alarm.notify()
            for worker in self._idle:
                worker.inbox.put([])
        self._timer.join()
        for worker in self._workers:
            worker.thread.join()

    # With the lock held:

    def _enqueue(self, job: Job, now: float) -> None:
        if (full := self.queue.full(job.size_bytes)) or job.deadline is not None:
            self._admission.check(job, now, full, self._current_runs)
        job.ready_at = now + job.executor.max_delay_seconds
        self.queue.push(job)
        if job.deadline is not None and job.deadline < self._alarm_at:
            self._alarm_at = job.deadline
            self._alarm.notify()
        self._wake()

    def _wake(self) -> None:
        """Let an idle worker look at the queue. Call it after each change of the queue, and when such a worker is busy
        again.
        """
        if self._idle and len(self.queue):
            self._idle[-1].inbox.put([])

    def _runs_at_once(self, executor: TierExecutor) -> bool:
        if not self._idle or len(self.queue):
            return False
        return not executor.max_delay_seconds or len(self._idle) == self.instances

    def _current_runs(self) -> list[Run | ContinuousRun]:
        if self._idle:
            return []
        runs: list[Run | ContinuousRun] = []
        for worker in self._workers:
            continuous, run = worker.continuous, worker.run  # the worker replaces them at any time
            runs += continuous
            if run and not (continuous and run.executor.iterative):  # a session's run is one of the continuous ones
                runs.append(run)
        return runs

    def _assign(self, worker: Worker, jobs: list[Job], now: float) -> None:
        worker.run = Run.of(jobs, now)
        worker.inbox.put(jobs)

    # On the threads of the scheduler:

    def _guard(self, worker: Worker | None = None) -> None:
        """Run a worker, or the timer without one; its end by an error counts as the loss of the device."""
        try:
            if worker:
                self._work(worker)
            else:
                self._expire()
        except BaseException as error:
            log.exception("a thread of the scheduler has ended")
            self.runs.lose(f"the thread {threading.current_thread().name} ended by {type(error).__name__}")
            self._refuse([*worker.jobs, *worker.stepped] if worker else [])

    def _refuse_all(self) -> None:
        with self._lock:
            waiting = list(self.queue)
            for job in waiting:
                self.queue.remove(job)
        self._refuse(waiting)

    def _refuse(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.ended:
                job.error = self.runs.refusal()
            self.forget(job)
        deliver(jobs)

    def _work(self, worker: Worker) -> None:
        wait: float | None = None
        while True:
            try:
                item = worker.inbox.get(timeout=wait)
            except Empty:
                item = []
            if item is None:
                return
            if callable(item):
                item()
            elif item:
                self._run(item, worker)
            del item  # it would keep the last requests' tensors alive until the next ones come
            wait = self._next(worker)

    def _run(self, jobs: list[Job], worker: Worker) -> None:
        """Compute jobs; those of iterative programs go on step by step, and leave room for others in between."""
        while True:
            following: list[Job] = []
            if jobs and jobs[0].executor.iterative:
                worker.jobs, worker.stepped = [], [*worker.stepped, *jobs]
                self._end(self._continuous(jobs[0].executor, worker).admit(jobs), worker)
            elif jobs:
                following = self._compute(jobs, worker)
            for run in worker.continuous:
                self._end(run.step(), worker)
            worker.continuous = tuple([run for run in worker.continuous if run.jobs])
            worker.stepped = [job for run in worker.continuous for job in run.jobs]  # without the answered ones
            if not worker.continuous and not following:
                return
            if not following:  # it would wait for that, and no other worker can take it any more
                self._do_own_work(worker)
            jobs = following or self._take(worker, rooms={run.executor: run.room for run in worker.continuous})

    def _continuous(self, executor: TierExecutor, worker: Worker) -> ContinuousRun:
        assert isinstance(executor, LoopExecutor)
        for run in worker.continuous:
            if run.executor is executor:
                return run
        run = ContinuousRun(executor, self.runs, worker.index, lambda: self._admission.return_seconds)
        worker.continuous = (*worker.continuous, run)
        return run

    def _do_own_work(self, worker: Worker) -> None:
        while not worker.inbox.empty():
            item = worker.inbox.get()
            assert not isinstance(item, list) or not item, "a worker that is busy gets no run"
            if callable(item):
                item()

    def _end(self, ended: list[Job], worker: Worker) -> None:
        if ended:
            deliver([job for job in ended if job.ended])
            self._settle(ended, worker)

    def _compute(self, jobs: list[Job], worker: Worker) -> list[Job]:
        """Compute jobs, and those that follow them without a pause of the device, unless a session's next step waits.

        Return the jobs that follow last if their program is iterative; they have been taken, and not started.
        """
        worker.jobs = jobs
        flight = self.runs.start(jobs, worker.index)
        while jobs and not jobs[0].executor.iterative:
            overlaps = flight is not None and flight.on_device and not worker.continuous
            followers = self._take_late(flight, worker) if flight and overlaps and worker.busy else []
            following = self._start(followers, worker)
            if flight and (failed := self.runs.finish(flight, worker.index)):
                if following:
                    failed = [*failed, *self.runs.finish(following, worker.index)]
                    jobs, followers, following = [*jobs, *followers], [], None
                self.runs.retry(failed, worker.index)
            if overlaps and not followers:
                followers = self._take(worker)
                following = self._start(followers, worker)
            worker.busy = bool(followers)
            deliver([job for job in jobs if job.ended])  # before anything else, because clients wait for it
            self._settle(jobs, worker)
            worker.jobs = followers
            jobs, flight = followers, following
        return jobs

    def _start(self, jobs: list[Job], worker: Worker) -> Flight | None:
        worker.jobs = [*worker.jobs, *jobs]
        if not jobs or jobs[0].executor.iterative:
            return None
        begun = time.perf_counter()
        flight = self.runs.start(jobs, worker.index)
        worker.start_seconds += _START_WEIGHT * (time.perf_counter() - begun - worker.start_seconds)
        return flight

    def _take_late(self, flight: Flight, worker: Worker) -> list[Job]:
        seconds = flight.executor.latency.usual_seconds(flight.size) or 0.0
        begun = max(flight.begun_ns, self.runs.free_ns[worker.index]) / 1e9
        left = begun + _TAKEN_AT * seconds - _STARTS_EARLY * worker.start_seconds - time.perf_counter()
        if left > _SHORTEST_SLEEP_SECONDS:
            time.sleep(left)
        return self._take(worker, begun + seconds - time.perf_counter())

    def _take(
        self, worker: Worker, seconds: float = 0.0, rooms: Mapping[TierExecutor, int] = MappingProxyType({})
    ) -> list[Job]:
        """Take the next run, which begins in ``seconds``; the server's own work comes first."""
        now = time.monotonic()
        with self._lock:
            jobs = self.queue.take(now, rooms) if worker.inbox.empty() else []
            if jobs:
                worker.run = Run.of(jobs, now + max(seconds, 0.0))
                self._wake()
            return jobs

    def _next(self, worker: Worker, *, returned: bool = False) -> float | None:
        """Give a worker its next run, or mark it as idle; return how many seconds it may sleep."""
        now = time.monotonic()
        with self._lock:
            if returned:
                worker.replaced = False
            if worker.replaced or not worker.inbox.empty():
                return None
            if jobs := self.queue.take(now):
                if worker in self._idle:
                    self._idle.remove(worker)
                self._assign(worker, jobs, now)
                self._wake()
                return None
            if self._closing and not len(self.queue):
                worker.inbox.put(None)
                return None
            if worker not in self._idle:
                self._idle.append(worker)
            ready_at = self.queue.ready_at()
            return None if ready_at is None else max(ready_at - now, 0.0)

    def _expire(self) -> None:
        while True:
            with self._lock:
                if self._closing and not len(self.queue):
                    return
                now = time.monotonic()
                late = self.queue.take_expired(now)
                if late:
                    self._wake()
                else:
                    self._alarm_at = self.queue.next_deadline() or math.inf
                    # Nothing notifies this thread while the scheduler closes, so it polls.
                    limit = 0.05 if self._closing else threading.TIMEOUT_MAX
                    self._alarm.wait(min(self._alarm_at - now, limit))
                    continue
                for estimate in [job.estimate for job in late if job.estimate]:
                    self._admission.correction.abandoned(now, estimate)
            for job in late:
                job.expire()
                self.forget(job)
            deliver(late)
            del job, late

    def _settle(self, ended: Sequence[Job], worker: Worker) -> None:
        for job in ended:
            self.forget(job)
        self.runs.learn(worker.index)
        if estimates := [job.estimate for job in ended if job.estimate and job.answer]:
            now = time.monotonic()
            with self._lock:
                for estimate in estimates:
                    self._admission.correction.answered(now, estimate)
