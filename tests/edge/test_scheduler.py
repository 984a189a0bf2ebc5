"""The scheduler: order, bounds, deadlines and cancellation at every stage, and no job can harm another."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, Overloaded
from edge.programs.program import Computed, Options, Program
from edge.scheduling.batching import Joiner
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.use_count import UseCount
from tests.support.lanes import VALUES, WAIT, Awaited, job_of, lane_of, occupied, output, run, submitted
from tests.support.metrics import wait_until

ROW_BYTES = 4
until = partial(wait_until, seconds=10)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(max_queue_size=4)
    yield scheduler
    scheduler.close()


def is_empty(scheduler: Scheduler) -> bool:
    return (scheduler.depth, scheduler.queued_bytes, scheduler.fullness) == (0, 0, 0)


def test_jobs_run_in_order(scheduler: Scheduler) -> None:
    done: list[int] = []
    with occupied(scheduler):
        jobs = [run(scheduler, lambda number=number: done.append(number)) for number in range(4)]  # type: ignore[misc]
        assert done == []
    for job in jobs:
        job.result(WAIT)
    assert done == [0, 1, 2, 3]


def test_everything_runs_on_one_thread_that_is_not_the_caller(scheduler: Scheduler) -> None:
    def where() -> tuple[int, str]:
        return threading.get_ident(), threading.current_thread().name

    found = {output(run(scheduler, where)) for _ in range(3)} | {scheduler.call(where)}
    assert len(found) == 1
    ((ident, name),) = found
    assert ident != threading.get_ident()
    assert name == "device-0"


def test_without_a_device_the_servers_own_work_runs_where_it_is_called() -> None:
    scheduler = Scheduler(4, device_bound=False)
    with occupied(scheduler):  # loading a model waits for no request, and no request for it
        assert scheduler.call(threading.get_ident) == threading.get_ident()
    scheduler.close()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_an_exception_reaches_its_own_job_only(scheduler: Scheduler, kind: type[BaseException]) -> None:
    error = kind("mine")

    def fail() -> None:
        raise error

    with occupied(scheduler):
        before, failing, after = run(scheduler, lambda: 1), run(scheduler, fail), run(scheduler, lambda: 2)
    assert output(before) == 1
    assert failing.exception(WAIT) is error
    assert output(after) == 2
    with pytest.raises(kind, match="mine"):
        scheduler.call(fail)
    assert scheduler.call(lambda: 3) == 3


class Returning(Program):
    """A program that returns what a test wants for negative rows, and the rows for others."""

    def __init__(self, computed: Any) -> None:
        self._computed = computed

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Any:
        return self._computed if (inputs["x"] < 0).any() else Computed({"y": inputs["x"]})


@pytest.mark.parametrize("max_rows", [0, 8])
@pytest.mark.parametrize("computed", [None, Computed({"y": None})], ids=["no result", "no array"])  # type: ignore[dict-item]
def test_what_is_no_array_fails_its_own_job_only(scheduler: Scheduler, computed: Any, max_rows: int) -> None:
    lane = Lane("full", Returning(computed), Joiner(VALUES, {}), max_rows=max_rows)
    with occupied(scheduler):
        before, failing, after = (submitted(scheduler, job_of(lane, value)) for value in (1, -1, 2))
    assert failing.exception(WAIT)
    assert failing.answer is None
    assert (output(before).item(), output(after).item()) == (1, 2)
    assert not scheduler.runs.lost
    assert output(submitted(scheduler, job_of(lane, 3))).item() == 3


def test_a_full_queue_refuses_and_recovers(scheduler: Scheduler) -> None:
    with occupied(scheduler):
        waiting = [run(scheduler, lambda number=number: number) for number in range(4)]  # type: ignore[misc]
        assert (scheduler.depth, scheduler.fullness) == (4, 1)
        with pytest.raises(Overloaded) as caught:
            run(scheduler, lambda: 4)
        assert (caught.value.subject, str(caught.value.given)) == ("queue", "4 waiting requests")
        assert caught.value.expected == "fewer than 4"
        assert str(caught.value).startswith("queue: got 4 waiting requests, expected fewer than 4. ")
        assert (caught.value.cause, caught.value.retry_after_ms >= 1) == ("requests", True)
        assert scheduler.depth == 4
    assert [output(job) for job in waiting] == [0, 1, 2, 3]
    assert is_empty(scheduler)
    assert output(run(scheduler, lambda: 5)) == 5


def test_the_bytes_that_wait_are_bounded() -> None:
    scheduler = Scheduler(1000, max_queue_bytes=10 * ROW_BYTES)
    lane = lane_of(lambda rows: rows)
    with occupied(scheduler):
        first = submitted(scheduler, job_of(lane, *range(6)))
        second = submitted(scheduler, job_of(lane, *range(3)))
        assert (scheduler.queued_bytes, scheduler.fullness) == (9 * ROW_BYTES, 0.9)
        with pytest.raises(Overloaded, match="36 bytes in the waiting requests, expected fewer than 33") as caught:
            scheduler.submit(job_of(lane, *range(2)))
        assert caught.value.cause == "bytes"
        last = submitted(scheduler, job_of(lane, 1))
        assert scheduler.queued_bytes == 10 * ROW_BYTES
        assert first.cancel()
        assert scheduler.queued_bytes == 4 * ROW_BYTES
    assert [output(job).tolist() for job in (second, last)] == [[[0], [1], [2]], [[1]]]
    assert is_empty(scheduler)
    # One that is larger than the queue may still run: it does not wait.
    assert len(output(submitted(scheduler, job_of(lane, *range(100))))) == 100
    scheduler.close()


def test_texts_count_by_their_contents(scheduler: Scheduler) -> None:
    texts = np.array([[b"12345"], [b"678"]], np.object_)
    job = Awaited(lane_of(lambda rows: rows), {"x": texts}, 2)
    with occupied(scheduler):
        scheduler.submit(job)
        assert scheduler.queued_bytes == 8


def test_priorities_go_first_and_each_is_in_order() -> None:
    scheduler = Scheduler(100)
    done: list[tuple[int, int]] = []
    priorities = [5, 10, 1, 5, 1, 10, 2, 5]
    with occupied(scheduler):
        for number, priority in enumerate(priorities):
            run(scheduler, lambda key=(priority, number): done.append(key), priority=priority)
    scheduler.close()
    assert done == sorted(done)
    assert len(done) == len(priorities)


def test_the_servers_own_work_is_never_refused_and_goes_first(scheduler: Scheduler) -> None:
    done: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with occupied(scheduler):
            for _ in range(4):
                run(scheduler, lambda: done.append("request"))
            own = pool.submit(scheduler.call, lambda: done.append("own"))
            time.sleep(0.05)
        own.result(WAIT)
    assert until(lambda: len(done) == 5)
    assert done[0] == "own"


def test_a_job_that_is_late_already_is_refused(scheduler: Scheduler) -> None:
    with pytest.raises(DeadlineExceeded, match="ms of waiting, expected its turn before the deadline"):
        run(scheduler, lambda: None, deadline=time.monotonic() - 1)
    assert is_empty(scheduler)


def test_a_job_expires_while_the_worker_is_busy(scheduler: Scheduler) -> None:
    ran: list[str] = []
    with occupied(scheduler):
        late = run(scheduler, lambda: ran.append("late"), deadline=time.monotonic() + 0.05)
        later = run(scheduler, lambda: ran.append("later"), deadline=time.monotonic() + 0.1)
        early = run(scheduler, lambda: ran.append("early"), deadline=time.monotonic() + 3600)
        assert scheduler.depth == 3
        for job in (late, later):  # not when the worker has time for them
            assert isinstance(job.exception(WAIT), DeadlineExceeded)
        assert scheduler.depth == 1
    early.result(WAIT)
    assert ran == ["early"]
    assert is_empty(scheduler)


def test_deadlines_that_come_out_of_order_are_all_kept(scheduler: Scheduler) -> None:
    with occupied(scheduler):
        delays = (0.2, 0.05, 0.1)
        begun = time.monotonic()
        jobs = [run(scheduler, lambda: None, deadline=begun + delay) for delay in delays]
        for job, delay in zip(jobs, delays, strict=True):
            assert isinstance(job.exception(WAIT), DeadlineExceeded)
            assert time.monotonic() - begun >= delay


def test_a_cancelled_job_leaves_the_queue_at_once_and_harms_no_other(scheduler: Scheduler) -> None:
    ran: list[str] = []
    with occupied(scheduler):
        first, dropped, last = (
            run(scheduler, lambda name=name: ran.append(name))  # type: ignore[misc]
            for name in ("first", "dropped", "last")
        )
        assert dropped.cancel()
        assert (scheduler.depth, scheduler.queued_bytes) == (2, 2 * ROW_BYTES)
        assert dropped.cancel()  # a second time changes nothing
        assert scheduler.depth == 2
    first.result(WAIT)
    last.result(WAIT)
    assert ran == ["first", "last"]
    with pytest.raises(CancelledError):
        dropped.result(WAIT)
    assert is_empty(scheduler)


def test_the_most_that_waited_is_remembered(scheduler: Scheduler) -> None:
    assert (scheduler.peak_depth, scheduler.peak_queued_bytes) == (0, 0)
    lane = lane_of(lambda rows: rows)
    for waiting in (3, 1):
        with occupied(scheduler):
            jobs = [submitted(scheduler, job_of(lane, 1, 2)) for _ in range(waiting)]
        for job in jobs:
            job.result(WAIT)
    assert is_empty(scheduler)
    assert (scheduler.peak_depth, scheduler.peak_queued_bytes) == (3, 3 * 2 * ROW_BYTES)


def test_a_job_knows_where_it_is(scheduler: Scheduler) -> None:
    started, go = threading.Event(), threading.Event()

    def work(rows: Array) -> Array:
        started.set()
        assert go.wait(WAIT)
        return rows

    running = submitted(scheduler, job_of(lane_of(work), 0))
    assert started.wait(WAIT)
    queued = submitted(scheduler, job_of(lane_of(lambda rows: rows), 0))
    assert (running.place, queued.place) == ("running", "queued")
    go.set()
    output(queued)
    assert (running.place, queued.place) == ("answered", "answered")


def test_a_job_whose_time_runs_out_between_two_tries_was_running(scheduler: Scheduler) -> None:
    # The run that two share fails when the deadline of one has passed, so it is not tried alone.
    def work(rows: Array) -> Array:
        if len(rows) > 1:
            time.sleep(0.1)
            raise ValueError
        return rows

    lane = lane_of(work, max_rows=2)
    with occupied(scheduler):
        good = submitted(scheduler, job_of(lane, 1))
        late = submitted(scheduler, job_of(lane, 2, deadline=time.monotonic() + 0.05))
    assert output(good) == [[1]]
    with pytest.raises(DeadlineExceeded):
        late.result(WAIT)
    assert (good.place, late.place) == ("answered", "running")


def test_a_running_job_cannot_be_cancelled(scheduler: Scheduler) -> None:
    started, go = threading.Event(), threading.Event()

    def work() -> str:
        started.set()
        assert go.wait(WAIT)
        return "done"

    job = run(scheduler, work)
    assert started.wait(WAIT)
    assert not job.cancel()
    go.set()
    assert output(job) == "done"


def ends() -> dict[str, Callable[[Scheduler, Lane, UseCount], None]]:
    """Each way in which a job can end, with its use given back."""

    def answered(scheduler: Scheduler, lane: Lane, use: UseCount) -> None:
        submitted(scheduler, job_of(lane, 1, use=use)).result(WAIT)

    def failed(scheduler: Scheduler, lane: Lane, use: UseCount) -> None:
        assert submitted(scheduler, job_of(lane, -1, use=use)).exception(WAIT)

    def cancelled(scheduler: Scheduler, lane: Lane, use: UseCount) -> None:
        with occupied(scheduler):
            assert submitted(scheduler, job_of(lane, 1, use=use)).cancel()

    def expired(scheduler: Scheduler, lane: Lane, use: UseCount) -> None:
        with occupied(scheduler):
            deadline = time.monotonic() + 0.02
            assert submitted(scheduler, job_of(lane, 1, use=use, deadline=deadline)).exception(WAIT)

    def cancelled_in_hand(scheduler: Scheduler, lane: Lane, use: UseCount) -> None:
        go = threading.Event()
        scheduler._own(lambda: assert_(go.wait(WAIT)))
        job = job_of(lane, 1, use=use)
        with scheduler._lock:  # a worker has been chosen and has not begun yet
            scheduler._hand_over(scheduler._workers[0], [job], time.monotonic())
        assert not scheduler.cancel(job)
        go.set()

    return {f.__name__: f for f in (answered, failed, cancelled, expired, cancelled_in_hand)}


def assert_(value: bool) -> None:
    assert value


@pytest.mark.parametrize("end", ends())
async def test_a_use_that_was_ended_is_over_when_its_last_user_leaves(scheduler: Scheduler, end: str) -> None:
    users: list[int] = []

    def work(rows: Array) -> Array:
        users.append(use.users)
        assert (rows > 0).all()
        return rows

    use = UseCount()
    assert use.take()  # another request, still before its submission
    assert use.take()
    ends()[end](scheduler, lane_of(work), use)
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
    assert is_empty(scheduler)


async def test_a_use_without_users_is_over_at_its_end() -> None:
    use = UseCount()
    assert use.take()
    use.give_back()
    waiting = asyncio.create_task(use.wait_unused())
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    use.end()
    await asyncio.wait_for(waiting, WAIT)


def test_close_finishes_the_jobs_that_wait() -> None:
    scheduler = Scheduler(max_queue_size=8)
    with ThreadPoolExecutor(1) as pool:
        with occupied(scheduler):
            waiting = [run(scheduler, lambda number=number: number) for number in range(7)]  # type: ignore[misc]
            late = run(scheduler, lambda: 7, deadline=time.monotonic() + 0.02)
            closing = pool.submit(scheduler.close)
            assert isinstance(late.exception(WAIT), DeadlineExceeded)  # while it closes, too
        closing.result(WAIT)
    assert [output(job) for job in waiting] == list(range(7))


def _fail_with(tensor: np.ndarray) -> None:
    raise ValueError(f"cannot use {tensor.shape}")


@pytest.mark.parametrize("end", ["result", "exception", "cancelled", "expired"])
def test_no_tensor_outlives_its_job(scheduler: Scheduler, end: str) -> None:
    def submit() -> tuple[weakref.ref[Array], Awaited]:
        tensor = np.ones((1000, 1), np.float32)
        lane = lane_of(_fail_with if end == "exception" else lambda rows: rows.sum())
        deadline = time.monotonic() + 0.02 if end == "expired" else None
        return weakref.ref(tensor), submitted(scheduler, Awaited(lane, {"x": tensor}, 1000, deadline=deadline))

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
        # No other job comes that would take its place; the thread lets go of it on its own, a moment after the answer.
        assert until(lambda: tensor() is None)
    finally:
        gc.enable()


def test_each_of_many_submitters_gets_its_own_result() -> None:
    scheduler = Scheduler(max_queue_size=10_000)
    running = itertools.count()

    def work(number: int) -> int:
        nonlocal running
        assert next(running) == 0  # never two at once
        running = itertools.count()
        if number % 7 == 0:
            raise KeyError(number)
        return number * number

    def submitter(start: int) -> list[object]:
        jobs = [run(scheduler, lambda n=n: work(n)) for n in range(start, start + 100)]  # type: ignore[misc]
        return [job.exception(WAIT) or output(job) for job in jobs]

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(submitter, range(0, 1600, 100)))
    scheduler.close()
    for number, result in enumerate(result for part in results for result in part):
        if number % 7 == 0:
            assert isinstance(result, KeyError)
            assert result.args == (number,)
        else:
            assert result == number * number


def test_instances_compute_at_once_each_on_its_own() -> None:
    scheduler = Scheduler(10, instances=2)
    both = threading.Barrier(2)
    seen: list[int] = []

    def meet() -> None:
        both.wait(WAIT)
        seen.append(threading.get_ident())

    jobs = [run(scheduler, meet) for _ in range(6)]
    for job in jobs:
        job.result(WAIT)
    scheduler.close()
    assert len(set(seen)) == 2


def slow_lane(seconds: float, **options: object) -> Lane:
    """A lane of which the scheduler knows that it takes so long, and which takes no time."""
    lane = lane_of(lambda rows: rows, **options)
    for _ in range(50):
        lane.latency.observe(1, seconds)
    return lane


def test_what_is_predicted_to_be_late_is_refused(scheduler: Scheduler) -> None:
    lane = slow_lane(0.1)
    with occupied(scheduler, expected_seconds=0.5):
        with pytest.raises(Overloaded, match=r"deadline: got an answer in .* ms, as predicted") as caught:
            scheduler.submit(job_of(lane, 1, deadline=time.monotonic() + 0.4))
        # 0.5 s of the run that goes on, and 0.1 s of its own, but it allows only 0.4 s.
        assert (caught.value.cause, 150 < caught.value.retry_after_ms < 260) == ("deadline", True)
        assert is_empty(scheduler)
        fits = submitted(scheduler, job_of(lane, 1, deadline=time.monotonic() + 30))
        patient = submitted(scheduler, job_of(lane, 1))  # without a deadline nothing is too late
        assert 0.7 < scheduler.finish_seconds(job_of(lane, 1)) < 0.9
        # Only what comes before it counts.
        assert 0.5 < scheduler.finish_seconds(job_of(lane, 1, priority=1)) < 0.7
    fits.result(WAIT)
    patient.result(WAIT)


def test_an_idle_server_tries_whatever_was_predicted(scheduler: Scheduler) -> None:
    """Else a wrong prediction would refuse the very requests that could correct it."""
    lane = slow_lane(100.0)
    assert output(submitted(scheduler, job_of(lane, 1, deadline=time.monotonic() + 10))).tolist() == [[1]]


def test_admission_may_be_switched_off() -> None:
    scheduler = Scheduler(4, admission=False)
    with occupied(scheduler, expected_seconds=100):
        job = submitted(scheduler, job_of(slow_lane(100.0), 1, deadline=time.monotonic() + 0.02))
        assert isinstance(job.exception(WAIT), DeadlineExceeded)
    scheduler.close()


def test_joined_requests_are_predicted_together() -> None:
    scheduler = Scheduler(100)
    lane = slow_lane(0.1, max_rows=4)
    for size in (2, 3, 4):
        for _ in range(50):
            lane.latency.observe(size, 0.1)
    with occupied(scheduler):
        assert 0.1 <= scheduler.finish_seconds(job_of(lane, 1)) < 0.15
        jobs = [submitted(scheduler, job_of(lane, 1)) for _ in range(5)]
        # Five rows wait for two runs of 0.1 s, and a sixth takes part in the second.
        assert 0.2 <= scheduler.finish_seconds(job_of(lane, 1)) < 0.25
        assert 0.3 <= scheduler.finish_seconds(job_of(lane, 1, 2, 3, 4)) < 0.35
    for job in jobs:
        job.result(WAIT)
    scheduler.close()


def brief_lane(work: Callable[[Array], object]) -> Lane:
    lane = lane_of(work)
    for _ in range(50):
        lane.latency.observe(1, 1e-5)
    return lane


def test_what_is_over_sooner_than_a_thread_wakes_up_runs_where_it_is() -> None:
    scheduler = Scheduler(10, instances=2, device_bound=False)
    threads: list[int] = []

    def remember(rows: Array) -> Array:
        threads.append(threading.get_ident())
        return rows

    where = brief_lane(remember)
    job = submitted(scheduler, job_of(where, 0))
    assert job.done()
    assert threads == [threading.get_ident()]
    failing = submitted(scheduler, job_of(brief_lane(_fail_with), 0))
    assert isinstance(failing.exception(0), ValueError)
    with occupied(scheduler):  # nobody's instance is free
        waiting = submitted(scheduler, job_of(where, 0))
        assert not waiting.done()
    output(waiting)
    assert threads[1] != threads[0]
    assert until(lambda: is_empty(scheduler))
    scheduler.close()


def test_a_tier_that_was_long_once_is_not_brief() -> None:
    scheduler = Scheduler(10, device_bound=False)
    lane = brief_lane(lambda rows: rows)
    assert submitted(scheduler, job_of(lane, 0)).done()
    lane.latency.observe(1, 0.1)
    for _ in range(50):
        lane.latency.observe(1, 1e-5)
    assert (lane.latency.usual_seconds(1) or 1) < 1e-4
    assert not lane.latency.is_brief(1, time.monotonic())
    assert lane.latency.is_brief(1, time.monotonic() + 60)
    scheduler.close()


def test_a_run_on_a_device_never_leaves_its_thread(scheduler: Scheduler) -> None:
    names = brief_lane(lambda rows: threading.current_thread().name)
    assert output(submitted(scheduler, job_of(names, 0))) == "device-0"


def test_no_more_is_computed_at_once_than_there_are_instances() -> None:
    scheduler = Scheduler(10_000, instances=2, device_bound=False)
    places, most = threading.Semaphore(2), [0]

    def compute(rows: Array) -> Array:
        assert places.acquire(blocking=False)
        most[0] = max(most[0], 2 - places._value)
        time.sleep(0.0001)
        places.release()
        return rows

    lanes = [
        lane_of(compute, max_rows=rows, max_delay_seconds=delay) for rows, delay in ((0, 0.0), (2, 0.0), (4, 0.001))
    ]

    def submitter(seed: int) -> None:
        for number in range(60):
            lane = lanes[(seed + number) % len(lanes)]
            for _ in range(10):
                lane.latency.observe(1, 1e-6)  # it is always thought to be brief
            assert output(submitted(scheduler, job_of(lane, number))).tolist() == [[number]]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(submitter, range(6)))
    scheduler.close()
    assert (most, places._value) == ([2], 2)
