"""Jobs: their sizes, the end of their tensors and uses, and runs that overlap on the device."""

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from edge.programs.program import Computed, Program
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.job import Job, JobResult, UseCount, expired, take_all
from edge.scheduling.tier_executor import TierExecutor
from tests.support.jobs import VALUES, WAIT, Awaited, executor_of, job_of, occupied, output, submitted
from tests.support.metrics import wait_until

ROW_BYTES = 4
until = partial(wait_until, seconds=10)


def test_job_computes_the_sizes_that_are_not_given():
    joined, alone = executor_of(lambda rows: rows, max_rows=4), executor_of(lambda rows: rows)
    inputs = {"x": np.zeros((3, 1), np.float32)}
    job = Job(joined, inputs, 3)
    assert (job.size, job.size_bytes, job.shapes) == (3, 3 * ROW_BYTES, (("x", "f", (1,)),))
    given = Job(joined, inputs, 3, size=7, size_bytes=0, shapes="s")
    assert (given.size, given.size_bytes, given.key) == (7, 0, (joined, "full", "s"))
    assert Job(alone, inputs, 3, shapes="s").key == (alone, "full", None)
    assert (job.priority, job.stage, job.ended, job.batch_rows, job.nonfinite) == (5, "queued", False, 0, 0)
    assert str(expired(1_500_000)).startswith("request: got 1.5 ms of waiting, expected its turn before the deadline. ")
    for ending in ({"answer": JobResult({}, {})}, {"error": ValueError()}, {"computed_ns": 1}):
        assert Job(alone, inputs, 3, **ending).ended


def _fail_with(tensor):
    raise ValueError(f"cannot use {tensor.shape}")


@pytest.mark.parametrize("end", ["result", "exception", "cancelled", "expired"])
def test_no_tensor_outlives_its_job(scheduler, end):
    def submit():
        tensor = np.ones((1000, 1), np.float32)
        executor = executor_of(_fail_with if end == "exception" else lambda rows: rows.sum())
        deadline = time.monotonic() + 0.02 if end == "expired" else None
        return weakref.ref(tensor), submitted(scheduler, Awaited(executor, {"x": tensor}, 1000, deadline=deadline))

    gc.disable()  # a cycle would be found too late: a GPU's memory is gone long before Python's collector runs
    try:
        with occupied(scheduler):
            tensor, job = submit()
            if end == "cancelled":
                job.cancel()
            if end == "expired":
                job.exception(WAIT)
        if end != "cancelled":
            job.exception(WAIT)
        if end == "exception":
            del job  # the error's traceback holds its arguments
        # No other job comes that would take its place; the thread releases it by itself, a moment after the answer.
        assert until(lambda: tensor() is None)
    finally:
        gc.enable()


def _cancelled_before_its_run(scheduler, job):
    go = threading.Event()
    scheduler._workers[0].inbox.put(lambda: go.wait(WAIT) and None)
    with scheduler._lock:
        scheduler._assign(scheduler._workers[0], [job], time.monotonic())
    assert not scheduler.cancel(job)
    go.set()


@pytest.mark.parametrize("end", ["answered", "failed", "cancelled", "expired", "cancelled before its run"])
async def test_use_ends_when_its_last_user_leaves(scheduler, end):
    users = []

    def work(rows):
        users.append(use.users)
        assert (rows > 0).all()
        return rows

    use = UseCount()
    assert use.take()  # another request, still before its submission
    assert use.take()
    deadline = time.monotonic() + 0.2 if end == "expired" else None
    job = job_of(executor_of(work), -1 if end == "failed" else 1, holds=(use,), deadline=deadline)
    if end == "cancelled before its run":
        _cancelled_before_its_run(scheduler, job)
    elif end in ("answered", "failed"):
        assert bool(submitted(scheduler, job).exception(WAIT)) == (end == "failed")
    else:
        with occupied(scheduler):
            submitted(scheduler, job)
            assert job.cancel() if end == "cancelled" else job.exception(WAIT)
    assert until(lambda: use.users == 1)
    assert users in ([], [2])  # nothing is given back while it computes
    cancelled, waiting = (asyncio.create_task(use.wait_unused()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    use.end()
    assert not use.take()
    await asyncio.wait([cancelled, waiting], timeout=0.05)
    assert not waiting.done()
    await asyncio.to_thread(use.give_back)
    await asyncio.wait_for(waiting, WAIT)
    use.end()
    await use.wait_unused()
    without_users = UseCount()
    assert without_users.take()
    without_users.give_back()
    without_users.end()
    await asyncio.wait_for(without_users.wait_unused(), WAIT)


def test_all_uses_are_taken_or_none():
    model, head = UseCount(), UseCount()
    assert take_all((model, head))
    head.end()
    assert (take_all((model, head)), model.users, head.users) == (False, 1, 1)


@dataclass
class Accelerator(Program):
    """A device that computes one run after the other by itself; it fails if a row is negative."""

    fails_at: str = "end"
    run_seconds: float = 0.02
    error: str = "a negative row"
    start_seconds: float = 0.0
    events: list[tuple[str, list[float]]] = field(default_factory=list)  # "start" or "end", and the values of the run
    most: int = 0  # runs on the device at once
    pending: list[list[float]] = field(default_factory=list)
    free_at: float = 0.0

    def compute(self, inputs, tier):
        raise AssertionError("a run that can be started is started")

    def start(self, inputs, tier):
        rows = inputs["x"]
        values = rows[:, 0].tolist()
        self._check(rows, "start")
        time.sleep(self.start_seconds)
        self.free_at = end = max(time.monotonic(), self.free_at) + self.run_seconds
        self.pending.append(values)
        self.most = max(self.most, len(self.pending))
        self.events.append(("start", values))

        def result():
            assert self.pending.pop(0) == values, "results are taken in the order of the starts"
            time.sleep(max(end - time.monotonic(), 0))
            self.events.append(("end", values))
            self._check(rows, "end")
            return Computed({"y": rows * 2})

        return result

    def _check(self, rows, where):
        if self.fails_at == where and (rows < 0).any():
            raise RuntimeError(self.error)


def accelerated(accelerator, max_rows=0):
    return TierExecutor("full", accelerator, BatchAssembler(VALUES, {}), max_rows=max_rows, on_gpu=True)


def queued(scheduler, executor, values):
    with occupied(scheduler):
        return [submitted(scheduler, job_of(executor, value)) for value in values]


def test_next_run_starts_before_the_last_one_ends(scheduler):
    accelerator, numbers = Accelerator(), [float(number) for number in range(10)]
    begun = time.perf_counter()
    jobs = queued(scheduler, accelerated(accelerator), numbers)
    assert [output(job).item() for job in jobs] == [2 * number for number in numbers]
    seconds = time.perf_counter() - begun
    assert [values for event, values in accelerator.events if event == "end"] == [[number] for number in numbers]
    # The scheduler first has to learn how long a run takes.
    assert accelerator.events.index(("start", [8.0])) < accelerator.events.index(("end", [7.0]))
    assert accelerator.most == 2
    # No run's time contains that in which it waited for the device.
    assert 0.1 < sum(job.timings.compute_infer_ns for job in jobs) / 1e9 <= seconds


def test_requests_may_join_a_run_until_shortly_before_it_starts(scheduler):
    accelerator = Accelerator(run_seconds=0.2)
    executor = accelerated(accelerator, max_rows=2)
    for _ in range(20):
        executor.latency.observe(2, 0.2)
    jobs = queued(scheduler, executor, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert output(jobs[0]).item() == 0  # from now on a run has another one behind it, and 4 waits alone
    jobs.append(submitted(scheduler, job_of(executor, 5.0)))
    assert [output(job).item() for job in jobs] == [0, 2, 4, 6, 8, 10]
    assert ("start", [4.0, 5.0]) in accelerator.events


def test_next_run_is_taken_late_in_the_current_one(scheduler):
    worker, executor = scheduler._workers[0], accelerated(Accelerator(start_seconds=0.04))
    executor.latency.observe(1, 0.2)
    starts, takes = [], []
    for _ in range(3):  # the shortest counts, because a neighbour may take the processor
        worker.start_seconds = 0.008
        flight = scheduler._start([job_of(executor, 1)], worker)
        starts.append(worker.start_seconds)
        worker.start_seconds = 0.03
        waiting = job_of(executor, 1)
        scheduler.queue.push(waiting)
        now, begun_ns = time.monotonic(), time.perf_counter_ns()
        scheduler.runs.free_ns[0] = begun_ns + 50_000_000  # the previous run ended 50 ms later
        assert scheduler._take_late(flight._replace(begun_ns=begun_ns), worker) == [waiting]
        takes.append((time.perf_counter_ns() - begun_ns) / 1e9)
        assert worker.run[:3] == (pytest.approx(now + 0.05 + 0.2, abs=0.02), executor, 1)
    assert 0.008 + 0.032 / 8 <= min(starts) < 0.008 + 0.036 / 8
    expected = 0.05 + 0.75 * 0.2 - 2 * 0.03
    assert expected <= min(takes) < expected + 0.025


def test_sleep_before_a_run_does_not_lengthen_its_prediction(scheduler):
    executor = accelerated(Accelerator(run_seconds=0.005))
    for _ in range(2):
        for job in queued(scheduler, executor, [float(number) for number in range(50)]):
            output(job)
    assert (executor.latency.usual_seconds(1) or 0) < 0.05  # it would be seconds


@pytest.mark.parametrize("fails_at", ["start", "end"])
def test_failed_run_harms_no_other(scheduler, fails_at):
    executor = accelerated(Accelerator(fails_at), max_rows=2)
    values = [0.0, 1.0, 2.0, 3.0, 4.0, -5.0, 6.0, 7.0, 8.0, -9.0]
    for value, job in zip(values, queued(scheduler, executor, values), strict=True):
        if value < 0:
            assert str(job.exception(WAIT)) == "a negative row"
        else:
            assert output(job).item() == 2 * value
    assert executor.failures.count == 1  # the last one; a success in between has reset the count


def test_own_work_waits_for_no_more_than_two_runs(scheduler):
    accelerator = Accelerator()
    jobs = queued(scheduler, accelerated(accelerator), [float(number) for number in range(20)])
    output(jobs[3])
    events = scheduler.call(lambda: list(accelerator.events))
    assert len(events) <= 16
    assert [event for event, _ in events].count("start") == [event for event, _ in events].count("end")
    for job in jobs:
        output(job)


def test_loss_of_the_device_ends_the_runs_on_it(scheduler):
    dying = Accelerator(error="cuStreamSynchronize failed: an illegal memory access was encountered")
    failed = [job.exception(WAIT) for job in queued(scheduler, accelerated(dying), [0.0, 1.0, 2.0, -3.0, 4.0, 5.0])]
    assert failed[:3] == [None] * 3
    assert all(failed[3:])
    assert "illegal memory access" in scheduler.runs.lost
