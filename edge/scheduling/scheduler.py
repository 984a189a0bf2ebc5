"""The scheduler: which request computes when, on which thread, and with whom.

A request that finds a worker idle is handed to it at once, or computed where it is, in the worker's place, if that is
over sooner than the worker would wake up. The others wait in one bounded queue, from which a worker takes as many as
may share a run. What expires or is cancelled leaves the queue at that moment, whatever the workers do.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from edge.scheduling.admission import Admission, Begun
from edge.scheduling.job import Job, deliver, expired
from edge.scheduling.lane import Lane
from edge.scheduling.latency import LatencyTable
from edge.scheduling.queue import JobQueue
from edge.scheduling.runs import Flight, Runs

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_MAX_QUEUE_BYTES = 256 * 1024**2
#: Weight of a new sample in the mean time that the start of a run takes.
_START_WEIGHT = 1 / 8
#: The next run is taken after this part of the current one, and earlier by twice the time that its start takes. A run
#: that ends during the sleep before is measured too long; well below 1, such errors shrink from run to run.
_TAKEN_AT, _STARTS_EARLY = 0.75, 2.0
#: A sleep takes up to 0.1 ms longer than it should.
_SHORTEST_SLEEP_SECONDS = 0.0005


class _Worker:
    """A thread that computes. Its inbox takes runs and the server's own work; None ends it, [] makes it look around.

    ``run`` is what it was given last: when, of which lane, and of what size. ``lent`` is set while another thread takes
    its place. ``hand`` holds the requests that it is at. ``busy`` is whether its last run had another one right behind
    it, and ``start_seconds`` how long the start of a run takes.
    """

    def __init__(self, index: int, run: Callable[[_Worker], None]) -> None:
        self.index = index
        self.inbox: SimpleQueue[list[Job] | Callable[[], None] | None] = SimpleQueue()
        self.run: Begun | None = None
        self.lent = False
        self.hand: list[Job] = []
        self.busy = False
        self.start_seconds = 0.0
        self.thread = threading.Thread(target=run, args=(self,), name=f"device-{index}", daemon=True)


class Scheduler:
    """Runs jobs on worker threads.

    Args:
        max_queue_size: how many requests may wait before :meth:`submit` refuses.
        max_queue_bytes: how many bytes their tensors may hold.
        instances: worker threads; worker 0 is the one that owns a GPU.
        admission: whether to refuse requests that are predicted to miss their deadline.
        device_bound: whether runners belong to the thread that loads them, as those of a GPU do. Otherwise the
            server's own work runs where it is called, and a model that is being loaded delays no request.

    Attributes:
        runs: what the workers are at, and whether there is a device still.
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
        self._queue = JobQueue(max_queue_size, max_queue_bytes)
        self._returns = LatencyTable()
        self._admission = Admission(self._queue, instances, self._returns, admission)
        self._device_bound = device_bound
        self._lock = threading.Lock()
        self._alarm = threading.Condition(self._lock)
        self._alarm_at = math.inf
        self._closing = False
        self._workers = [_Worker(index, self._watched) for index in range(instances)]
        self._idle = self._workers[:]
        self._timer = threading.Thread(target=self._watched, name="expiry", daemon=True)
        for thread in (self._timer, *(worker.thread for worker in self._workers)):
            thread.start()

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """How many bytes their tensors hold."""
        return self._queue.size_bytes

    @property
    def peak_depth(self) -> int:
        """How many have waited at once since the start."""
        return self._queue.peak_jobs

    @property
    def peak_queued_bytes(self) -> int:
        """How many bytes their tensors have held at once."""
        return self._queue.peak_bytes

    @property
    def max_queue_size(self) -> int:
        """How many requests may wait."""
        return self._queue.max_jobs

    @property
    def fullness(self) -> float:
        """How full the queue is, by requests or bytes, 0 to 1."""
        return max(len(self._queue) / self._queue.max_jobs, self._queue.size_bytes / self._queue.max_bytes)

    def submit(self, job: Job) -> bool:
        """Run a job now if a worker is idle, or let it wait.

        Returns:
            Whether the job ended before this returned; then it is not delivered.

        Raises:
            ModelNotReady: the device is lost.
            DeadlineExceeded: its deadline has passed already.
            Overloaded: too many requests or bytes wait already, or it is predicted to end after its deadline.
        """
        now = time.monotonic()
        if job.deadline is not None and job.deadline <= now:
            raise expired(time.perf_counter_ns() - job.queued_ns)
        with self._lock:
            if self.runs.lost:
                raise self.runs.refusal()
            if not self._runs_at_once(job.lane):
                self._enqueue(job, now)
                return False
            worker = self._idle.pop()
            worker.lent = not self._device_bound and job.lane.latency.is_brief(job.size, now)
            if not worker.lent:
                self._hand_over(worker, [job], now)
                return False
        try:
            self.runs.execute((job,), worker.index)
            self._settle((job,), worker)
        finally:
            self._take_back(worker)
        return True

    def cancel(self, job: Job) -> bool:
        """Drop a job whose answer nobody wants any more.

        Returns:
            Whether it waited still. What a worker has begun it finishes and delivers.
        """
        job.cancelled = True
        with self._lock:
            waited = self._queue.remove(job)
            if waited:
                self._admission.drift.left(time.monotonic(), job.promise)
        if waited:  # otherwise a worker has it in hand
            self.forget(job)
        return waited

    def finish_seconds(self, job: Job) -> float:
        """Predict in how many seconds a job would be answered if it were submitted now; what is unknown counts 0."""
        with self._lock:
            if self._runs_at_once(job.lane):
                return job.lane.run_seconds(job.size) + self._admission.return_seconds
            return self._admission.finish_seconds(job, time.monotonic(), self._runs_before())

    def call(self, work: Callable[[], T]) -> T:
        """Do work of the server itself, such as loading a model, and wait for it; it is never refused."""
        if not self._device_bound:
            return work()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # whatever it is, the caller gets it and the thread lives on
                self.runs.check(error)
                future.set_exception(error)

        self._own(run)
        return future.result()

    def returned(self, seconds: float) -> None:
        """Learn how long an answer took from the end of its run to the transport; a busy transport is a queue too."""
        self._returns.observe(1, seconds)

    def close(self) -> None:
        """Finish the jobs that wait, then stop the threads."""
        with self._lock:
            self._closing = True
            self._alarm.notify()
            for worker in self._idle:
                worker.inbox.put([])
        self._timer.join()
        for worker in self._workers:
            worker.thread.join()

    def _own(self, work: Callable[[], None]) -> None:
        """Put work of the server into the inbox of the thread that owns the device, before the requests that wait."""
        owner = self._workers[0]
        with self._lock:
            if owner in self._idle:
                self._idle.remove(owner)
            owner.inbox.put(work)

    def _take_back(self, worker: _Worker) -> None:
        if self._look_around(worker, returned=True) is not None:
            worker.inbox.put([])  # something waits for others to join it; the worker has to know until when

    def _enqueue(self, job: Job, now: float) -> None:
        """Let a job wait. Only with the lock."""
        full = self._queue.full(job)
        if full or job.deadline is not None:
            self._admission.check(job, now, full, self._runs_before)
        job.ready_at = now + job.lane.max_delay_seconds
        self._queue.push(job)
        if job.deadline is not None and job.deadline < self._alarm_at:
            self._alarm_at = job.deadline
            self._alarm.notify()
        if self._idle:  # it waits for others to join it; a worker has to know until when
            self._idle[-1].inbox.put([])

    def _runs_at_once(self, lane: Lane) -> bool:
        if not self._idle or len(self._queue):
            return False
        return not lane.max_delay_seconds or len(self._idle) == self.instances

    def _runs_before(self) -> list[Begun]:
        """Return the runs that a request has to wait for. Only with the lock."""
        return [] if self._idle else [worker.run for worker in self._workers if worker.run]

    def _hand_over(self, worker: _Worker, jobs: list[Job], now: float) -> None:
        """Give an idle worker a run. Only with the lock."""
        size = jobs[0].size if len(jobs) == 1 else sum(job.size for job in jobs)
        worker.run = now, jobs[0].lane, size
        worker.inbox.put(jobs)

    def forget(self, job: Job) -> None:
        """Let go of what a job needed for its run, which is over or will not take place; a second time does nothing."""
        job.inputs = {}
        use, job.use = job.use, None
        if use:
            use.give_back()

    def _watched(self, worker: _Worker | None = None) -> None:
        """Be a thread of the scheduler, a worker's or the timer's. None of them may end unnoticed."""
        try:
            if worker:
                self._work(worker)
            else:
                self._expire()
        except BaseException as error:
            log.exception("a thread of the scheduler has ended")
            self.runs.lose(f"the thread {threading.current_thread().name} ended by {type(error).__name__}")
            self._refuse(worker.hand if worker else [])

    def _refuse_all(self) -> None:
        """End what waits: nothing will be computed any more."""
        with self._lock:
            waiting = list(self._queue)
            for job in waiting:
                self._queue.remove(job)
        self._refuse(waiting)

    def _refuse(self, jobs: list[Job]) -> None:
        """Deliver jobs whose thread ended or whose device is lost; those without an answer get an error."""
        for job in jobs:
            if not job.ended:
                job.error = self.runs.refusal()
            self.forget(job)
        deliver(jobs)

    def _work(self, worker: _Worker) -> None:
        wait: float | None = None
        while True:
            try:
                item = worker.inbox.get(timeout=wait)
            except Empty:
                item = []
            if item is None:
                return
            if callable(item):
                _guarded(item)
            elif item:
                self._compute(item, worker)
            del item  # it would keep the last requests' tensors alive until the next ones come
            wait = self._look_around(worker)

    def _compute(self, jobs: list[Job], worker: _Worker) -> None:
        """Compute jobs, and those that follow them without a pause of the device."""
        worker.hand = jobs
        flight = self.runs.start(jobs, worker.index)
        while jobs:
            overlaps = flight is not None and flight.on_device
            followers = self._before_end(flight, worker) if flight and overlaps and worker.busy else []
            following = self._start(followers, worker)
            failed = self.runs.finish(flight, worker.index) if flight else []
            if failed:
                if following:
                    failed = [*failed, *self.runs.finish(following, worker.index)]
                    jobs, followers, following = [*jobs, *followers], [], None
                self.runs.retry(failed, worker.index)
            if overlaps and not followers:
                followers = self._take(worker)
                following = self._start(followers, worker)
            worker.busy = bool(followers)
            deliver([job for job in jobs if job.ended])  # first of all, for clients wait for it
            self._settle(jobs, worker)
            worker.hand = followers
            jobs, flight = followers, following

    def _start(self, jobs: list[Job], worker: _Worker) -> Flight | None:
        """Start a run behind the one in hand."""
        if not jobs:
            return None
        worker.hand = [*worker.hand, *jobs]
        begun = time.perf_counter()
        flight = self.runs.start(jobs, worker.index)
        worker.start_seconds += _START_WEIGHT * (time.perf_counter() - begun - worker.start_seconds)
        return flight

    def _before_end(self, flight: Flight, worker: _Worker) -> list[Job]:
        """Take the next run late in the current one: until then requests may join it."""
        seconds = flight.lane.latency.usual_seconds(flight.size) or 0.0
        begun = max(flight.begun_ns, self.runs.free_ns[worker.index]) / 1e9
        left = begun + _TAKEN_AT * seconds - _STARTS_EARLY * worker.start_seconds - time.perf_counter()
        if left > _SHORTEST_SLEEP_SECONDS:
            time.sleep(left)
        return self._take(worker, begun + seconds - time.perf_counter())

    def _take(self, worker: _Worker, seconds: float = 0.0) -> list[Job]:
        """Take the next run, which begins in ``seconds``; the server's own work comes first."""
        now = time.monotonic()
        with self._lock:
            jobs = self._queue.take(now) if len(self._queue) and worker.inbox.empty() else []
            if jobs:
                worker.run = now + max(seconds, 0.0), jobs[0].lane, sum(job.size for job in jobs)
            return jobs

    def _look_around(self, worker: _Worker, *, returned: bool = False) -> float | None:
        """Put the next run into a worker's own inbox, or call it idle; return how long it may sleep."""
        now = time.monotonic()
        with self._lock:
            if returned:
                worker.lent = False
            if worker.lent or not worker.inbox.empty():
                return None
            jobs = self._queue.take(now) if len(self._queue) else None
            if jobs:
                if worker in self._idle:
                    self._idle.remove(worker)
                self._hand_over(worker, jobs, now)
                return None
            if self._closing and not len(self._queue):
                worker.inbox.put(None)
                return None
            if worker not in self._idle:
                self._idle.append(worker)
            ready_at = self._queue.ready_at() if len(self._queue) else None
            return None if ready_at is None else max(ready_at - now, 0.0)

    def _expire(self) -> None:
        """Let requests whose deadline passes leave the queue at that moment: the timer's thread."""
        while True:
            with self._lock:
                if self._closing and not len(self._queue):
                    return
                now = time.monotonic()
                late = self._queue.take_expired(now)
                if not late:
                    self._alarm_at = self._queue.next_deadline() or math.inf
                    # While it closes nobody notifies: what still waits is looked at every now and then.
                    limit = 0.05 if self._closing else threading.TIMEOUT_MAX
                    self._alarm.wait(min(self._alarm_at - now, limit))
                    continue
            self._end(late)
            del late

    def _settle(self, ended: Sequence[Job], worker: _Worker) -> None:
        """Let go of what jobs held that have ended, and learn from their runs."""
        for job in ended:
            self.forget(job)
        self.runs.learn(worker.index)
        promises = [job.promise for job in ended if job.promise and job.answer]
        if promises:
            now = time.monotonic()
            with self._lock:
                for promise in promises:
                    self._admission.drift.kept(now, promise)

    def _end(self, late: list[Job]) -> None:
        now = time.monotonic()
        with self._lock:
            for promise in [job.promise for job in late]:
                self._admission.drift.left(now, promise)
        for job in late:
            job.expire()
            self.forget(job)
        deliver(late)


def _guarded(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:  # closing a replaced model concerns no request, and the thread lives on
        log.exception("the server's own work failed")
