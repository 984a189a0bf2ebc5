"""The scheduler's threads: order, deadlines and cancellation at every stage, and no job harms another."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest

from edge.errors import DeadlineExceeded, ModelNotReady, Overloaded
from edge.programs.program import Computed, Program
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor
from tests.support.jobs import VALUES, WAIT, executor_of, job_of, occupied, output, run, submitted
from tests.support.metrics import wait_until

ROW_BYTES = 4
until = partial(wait_until, seconds=10)


@pytest.fixture
def scheduler():
    scheduler = Scheduler(max_queue_size=4)
    yield scheduler
    scheduler.close()


def known(seconds, work=lambda rows: rows):
    """An executor whose runs of one row are predicted to take so long."""
    executor = executor_of(work)
    for _ in range(50):
        executor.latency.observe(1, seconds)
    return executor


class Held:
    def __init__(self):
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, rows):
        self.started.set()
        assert self.go.wait(WAIT)
        return rows


def test_device_has_one_thread_that_is_not_the_callers(scheduler):
    def where(rows=None):
        return threading.get_ident(), threading.current_thread().name

    jobs = [submitted(scheduler, job_of(known(1e-5, where), 0)) for _ in range(3)]
    found = {*map(output, jobs), scheduler.call(where)}
    assert (len(found), found.pop()) == (1, (scheduler._workers[0].thread.ident, "device-0"))
    assert scheduler.queue.max_bytes == 268_435_456
    two = Scheduler(4, instances=2)
    assert {two.call(where)[1] for _ in range(4)} == {"device-0"}
    two.close()
    for each in (scheduler, two):  # one that is not closed does not hold up the end of the process
        assert all(thread.daemon for thread in (each._timer, *(worker.thread for worker in each._workers)))


def test_own_work_runs_on_the_calling_thread_without_a_device():
    scheduler = Scheduler(4, device_bound=False)
    with occupied(scheduler):  # loading a model waits for no request, and no request for it
        assert scheduler.call(threading.get_ident) == threading.get_ident()
    scheduler.close()


def test_own_work_is_never_rejected_and_goes_first(scheduler):
    done = []
    with ThreadPoolExecutor(1) as pool:
        with occupied(scheduler):
            for _ in range(4):
                run(scheduler, lambda: done.append("request"))
            own = pool.submit(scheduler.call, lambda: done.append("own"))
            time.sleep(0.05)
        own.result(WAIT)
    assert until(lambda: len(done) == 5)
    assert done[0] == "own"


class Returning(Program):
    """A program that returns a given result for negative rows, and the rows for others."""

    def __init__(self, computed):
        self._computed = computed

    def compute(self, inputs, tier):
        return self._computed if (inputs["x"] < 0).any() else Computed({"y": inputs["x"]})


@pytest.mark.parametrize("max_rows", [0, 8])
@pytest.mark.parametrize("computed", [None, Computed({"y": None})], ids=["no result", "no array"])
def test_result_that_is_no_array_fails_its_own_job_only(scheduler, computed, max_rows):
    executor = TierExecutor("full", Returning(computed), BatchAssembler(VALUES, {}), max_rows=max_rows)
    with occupied(scheduler):
        before, failing, after = (submitted(scheduler, job_of(executor, value)) for value in (1, -1, 2))
    assert failing.exception(WAIT)
    assert failing.answer is None
    assert (output(before).item(), output(after).item()) == (1, 2)
    assert not scheduler.runs.lost
    assert output(submitted(scheduler, job_of(executor, 3))).item() == 3


def test_full_queue_rejects_requests_and_recovers():
    scheduler = Scheduler(4, max_queue_bytes=10 * ROW_BYTES)
    executor = executor_of(lambda rows: rows)
    with occupied(scheduler):
        waiting = [submitted(scheduler, job_of(executor, number)) for number in range(4)]
        with pytest.raises(Overloaded, match="queue: got 4 waiting requests, expected fewer than 4"):
            submitted(scheduler, job_of(executor, 4))
        assert waiting.pop().cancel()
        with pytest.raises(Overloaded, match="queue: got 44 bytes with this request, expected at most 40"):
            submitted(scheduler, job_of(executor, *range(8)))
        assert (len(scheduler.queue), scheduler.queue.size_bytes) == (3, 3 * ROW_BYTES)
    assert [output(job).item() for job in waiting] == [0, 1, 2]
    # A request larger than the queue may still run if it does not wait.
    assert len(output(submitted(scheduler, job_of(executor, *range(100))))) == 100
    scheduler.close()


def test_jobs_expire_at_their_deadlines_while_the_worker_is_busy(scheduler):
    with pytest.raises(DeadlineExceeded, match=r"got \d+\.\d ms of waiting, expected its turn before the deadline"):
        run(scheduler, lambda: None, deadline=time.monotonic() - 1)
    ran = []
    with occupied(scheduler):
        begun = time.monotonic()
        jobs = [run(scheduler, lambda: ran.append("late"), deadline=begun + delay) for delay in (0.2, 0.05, 0.1)]
        patient = run(scheduler, lambda: ran.append("patient"), deadline=begun + 3600)
        for job, delay in zip(jobs, (0.2, 0.05, 0.1), strict=True):
            assert isinstance(job.exception(WAIT), DeadlineExceeded)
            assert time.monotonic() - begun >= delay
        assert len(scheduler.queue) == 1
    patient.result(WAIT)
    assert ran == ["patient"]


def test_running_job_is_delivered_although_it_was_cancelled(scheduler):
    work = Held()
    running = submitted(scheduler, job_of(executor_of(work), 7))
    assert work.started.wait(WAIT)
    queued = submitted(scheduler, job_of(executor_of(lambda rows: rows), 0))
    assert (running.stage, queued.stage) == ("running", "queued")
    assert not running.cancel()
    work.go.set()
    output(queued)
    assert (output(running).item(), running.stage, queued.stage) == (7, "answered", "answered")


def test_job_that_expires_between_two_tries_counts_as_running(scheduler):
    # The run that two share fails after the deadline of one, so that one is not tried alone.
    def work(rows):
        if len(rows) > 1:
            time.sleep(0.1)
            raise ValueError
        return rows

    executor = executor_of(work, max_rows=2)
    with occupied(scheduler):
        good = submitted(scheduler, job_of(executor, 1))
        late = submitted(scheduler, job_of(executor, 2, deadline=time.monotonic() + 0.05))
    assert output(good) == [[1]]
    with pytest.raises(DeadlineExceeded):
        late.result(WAIT)
    assert (good.stage, late.stage) == ("answered", "running")


def test_neighbours_that_leave_or_expire_are_not_computed(scheduler):
    sizes = []
    executor = executor_of(lambda rows: sizes.append(len(rows)) or rows * 2, max_rows=100)
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(executor, value, value)) for value in range(3)]
        assert submitted(scheduler, job_of(executor, 9, deadline=time.monotonic() + 0.02)).exception(WAIT)
        assert jobs.pop(1).cancel()
    assert ([output(job).ravel().tolist() for job in jobs], sizes) == ([[0, 0], [4, 4]], [4])


@pytest.mark.parametrize("instances", [1, 2])
def test_request_that_finds_the_server_busy_waits_for_others(instances):
    scheduler = Scheduler(100, instances=instances)
    sizes = []
    executor = executor_of(lambda rows: sizes.append(len(rows)) or rows, max_rows=3, max_delay_seconds=0.2)
    begun = time.monotonic()
    for together in (2, 3):  # three are as many as fit
        with occupied(scheduler):
            jobs = [submitted(scheduler, job_of(executor, value)) for value in range(together)]
        for job in jobs:
            job.result(WAIT)
        assert time.monotonic() - begun >= 0.2
    scheduler.close()
    assert sizes == [2, 3]


def test_only_a_busy_server_makes_a_request_wait_and_that_delays_no_other_model():
    scheduler = Scheduler(100, instances=2)
    executor = executor_of(lambda rows: rows, max_rows=8, max_delay_seconds=2 * WAIT)
    assert output(submitted(scheduler, job_of(executor, 1))).tolist() == [[1]]  # the server is idle
    work = Held()
    holding = submitted(scheduler, job_of(executor_of(work), 0))
    assert work.started.wait(WAIT)
    patient = submitted(scheduler, job_of(executor, 1))
    assert output(submitted(scheduler, job_of(executor_of(lambda rows: rows), 2))).tolist() == [[2]]
    assert not patient.done()
    assert patient.cancel()
    work.go.set()
    holding.result(WAIT)
    scheduler.close()


def test_predicted_misses_are_rejected_while_the_server_is_busy(scheduler):
    executor = known(0.1)
    with occupied(scheduler, expected_seconds=0.5):
        # 0.5 s of the current run, and 0.1 s of its own, but it allows only 0.4 s.
        with pytest.raises(Overloaded, match=r"deadline: got an answer in .* ms, as predicted") as caught:
            scheduler.submit(job_of(executor, 1, deadline=time.monotonic() + 0.4))
        assert (caught.value.cause, 150 < caught.value.retry_after_ms < 260) == ("deadline", True)
        assert len(scheduler.queue) == 0
        fits = submitted(scheduler, job_of(executor, 1, deadline=time.monotonic() + 30))
        patient = submitted(scheduler, job_of(executor, 1))  # without a deadline nothing is too late
        assert 0.7 < scheduler.finish_seconds(job_of(executor, 1)) < 0.9
        assert 0.5 < scheduler.finish_seconds(job_of(executor, 1, priority=1)) < 0.7
    fits.result(WAIT)
    patient.result(WAIT)
    # An idle server tries; otherwise a wrong prediction would reject the requests that could correct it.
    assert until(lambda: bool(scheduler._idle))
    assert scheduler.finish_seconds(job_of(known(100.0), 1)) == pytest.approx(100, rel=0.01)
    assert output(submitted(scheduler, job_of(known(100.0), 1, deadline=time.monotonic() + 10))) == [[1]]


def test_missed_deadlines_raise_the_predictions_and_met_ones_lower_them(scheduler):
    executor = known(0.25)
    with occupied(scheduler):
        before = scheduler.finish_seconds(job_of(executor, 1))
        for end in ("expired", "cancelled"):
            job = submitted(scheduler, job_of(executor, 1, deadline=time.monotonic() + 0.45))
            if end == "expired":
                assert isinstance(job.exception(WAIT), DeadlineExceeded)
            else:
                assert job.cancel()
            assert scheduler.finish_seconds(job_of(executor, 1)) == pytest.approx(1.25 * before, rel=0.02)
        met = submitted(scheduler, job_of(executor, 1, deadline=time.monotonic() + 0.6))
        factor = scheduler._admission.correction._factor
    met.result(WAIT)
    assert until(lambda: scheduler._admission.correction._factor < factor)


def test_brief_run_is_computed_by_the_submitting_thread():
    scheduler = Scheduler(10, instances=2, device_bound=False)
    threads = []

    def remember(rows):
        threads.append(threading.get_ident())
        return rows

    brief = known(1e-5, remember)
    assert submitted(scheduler, job_of(brief, 0)).done()
    assert threads == [threading.get_ident()]
    failing = known(1e-5, Mock(side_effect=ValueError("never")))
    assert isinstance(submitted(scheduler, job_of(failing, 0)).exception(0), ValueError)
    with occupied(scheduler):  # no instance is free
        waiting = submitted(scheduler, job_of(brief, 0))
        assert not waiting.done()
    output(waiting)
    assert threads[1] != threads[0]
    scheduler.close()


def test_no_more_is_computed_at_once_than_there_are_instances():
    scheduler = Scheduler(10_000, instances=2, device_bound=False)
    places, most = threading.Semaphore(2), [0]

    def compute(rows):
        assert places.acquire(blocking=False)
        most[0] = max(most[0], 2 - places._value)
        time.sleep(0.0001)
        places.release()
        return rows

    options = ((0, 0.0), (2, 0.0), (4, 0.001))
    executors = [executor_of(compute, max_rows=rows, max_delay_seconds=delay) for rows, delay in options]

    def submitter(seed):
        for number in range(60):
            executor = executors[(seed + number) % len(executors)]
            for _ in range(10):
                executor.latency.observe(1, 1e-6)  # it always seems to be brief
            assert output(submitted(scheduler, job_of(executor, number))).tolist() == [[number]]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(submitter, range(6)))
    scheduler.close()
    assert (most, places._value) == ([2], 2)


def test_end_of_a_thread_ends_the_requests_and_rejects_further_ones(scheduler):
    class Repeats(float):
        def __sub__(self, other):
            raise ZeroDivisionError

    lost = []
    refuse, scheduler.runs.on_lost = scheduler.runs.on_lost, lambda: (lost.append("lost"), refuse())[0]
    with occupied(scheduler):
        computed = submitted(scheduler, job_of(executor_of(lambda rows: rows, repeats=Repeats(1)), 1))
        waiting = run(scheduler, lambda: None)
    assert output(computed) == 1  # before its thread ended
    reason = "the thread device-0 ended by ZeroDivisionError"
    expected = f"server: got {reason}, expected a device that computes. Use another server; this one ends, so that "
    assert str(waiting.exception(WAIT)).startswith(expected)
    with pytest.raises(ModelNotReady, match=reason):
        run(scheduler, lambda: None)
    scheduler.runs.lose("again")
    assert (scheduler.runs.lost, lost) == (reason, ["lost"])
