"""The device thread: one thread, in order, and no job can harm another."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from edge.device import DeviceThread
from edge.errors import DeadlineExceeded, Overloaded

WAIT = 60.0


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    device = DeviceThread(max_queue_size=4)
    yield device
    device.close()


@contextmanager
def occupied(device: DeviceThread) -> Iterator[None]:
    """Keep the thread busy while the block runs, so that what the block submits has to wait."""
    started, go = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert go.wait(WAIT)

    future = device.submit(hold)
    assert started.wait(WAIT)
    try:
        yield
    finally:
        go.set()
        future.result(WAIT)


def test_jobs_run_in_order(device: DeviceThread) -> None:
    done: list[int] = []
    with occupied(device):
        futures = [device.submit(lambda number=number: done.append(number)) for number in range(4)]  # type: ignore[misc]
        assert done == []
    for future in futures:
        future.result(WAIT)
    assert done == [0, 1, 2, 3]


def test_everything_runs_on_one_thread_that_is_not_the_caller(device: DeviceThread) -> None:
    def where() -> tuple[int, str]:
        return threading.get_ident(), threading.current_thread().name

    found = {device.submit(where).result(WAIT) for _ in range(3)} | {device.call(where)}
    assert len(found) == 1
    ((ident, name),) = found
    assert ident != threading.get_ident()
    assert name == "device"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_an_exception_reaches_its_own_future_only(device: DeviceThread, kind: type[BaseException]) -> None:
    error = kind("mine")

    def fail() -> None:
        raise error

    with occupied(device):
        before, failing, after = device.submit(lambda: 1), device.submit(fail), device.submit(lambda: 2)
    assert before.result(WAIT) == 1
    assert failing.exception(WAIT) is error
    assert after.result(WAIT) == 2
    with pytest.raises(kind, match="mine"):
        device.call(fail)
    assert device.call(lambda: 3) == 3


def test_a_full_queue_refuses_and_recovers(device: DeviceThread) -> None:
    with occupied(device):
        waiting = [device.submit(lambda number=number: number) for number in range(4)]  # type: ignore[misc]
        assert device.depth == 4
        with pytest.raises(Overloaded) as caught:
            device.submit(lambda: 4)
        assert (caught.value.subject, str(caught.value.given)) == ("queue", "4 waiting requests")
        assert caught.value.expected == "fewer than 4"
        assert caught.value.fix
        assert str(caught.value).startswith("queue: got 4 waiting requests, expected fewer than 4. ")
        assert device.depth == 4
    assert [future.result(WAIT) for future in waiting] == [0, 1, 2, 3]
    assert device.depth == 0
    assert device.submit(lambda: 5).result(WAIT) == 5


def test_the_servers_own_jobs_are_never_refused(device: DeviceThread) -> None:
    with ThreadPoolExecutor(1) as pool:
        with occupied(device):
            for _ in range(4):
                device.submit(lambda: None)
            own = pool.submit(device.call, lambda: "loaded")
            while device.depth < 5:
                time.sleep(0.001)
        assert own.result(WAIT) == "loaded"


def test_an_expired_job_is_not_started(device: DeviceThread) -> None:
    ran: list[str] = []
    with occupied(device):
        late = device.submit(lambda: ran.append("late"), time.monotonic() - 1)
        early = device.submit(lambda: ran.append("early"), time.monotonic() + 3600)
    error = late.exception(WAIT)
    early.result(WAIT)
    assert isinstance(error, DeadlineExceeded)
    assert "ms of waiting, expected its turn before the deadline" in str(error)
    assert ran == ["early"]


def test_a_job_may_expire_while_it_waits(device: DeviceThread) -> None:
    with occupied(device):
        deadline = time.monotonic() + 0.01
        job = device.submit(lambda: None, deadline)
        while time.monotonic() <= deadline:
            time.sleep(0.001)
    assert isinstance(job.exception(WAIT), DeadlineExceeded)


def test_a_cancelled_job_is_not_started_and_harms_no_other(device: DeviceThread) -> None:
    ran: list[str] = []
    with occupied(device):
        first = device.submit(lambda: ran.append("first"))
        dropped = device.submit(lambda: ran.append("dropped"))
        last = device.submit(lambda: ran.append("last"))
        assert dropped.cancel()
    first.result(WAIT)
    last.result(WAIT)
    assert ran == ["first", "last"]
    with pytest.raises(CancelledError):
        dropped.result(WAIT)


def test_a_running_job_cannot_be_cancelled(device: DeviceThread) -> None:
    started, go = threading.Event(), threading.Event()

    def work() -> str:
        started.set()
        assert go.wait(WAIT)
        return "done"

    job = device.submit(work)
    assert started.wait(WAIT)
    assert not job.cancel()
    go.set()
    assert job.result(WAIT) == "done"


def test_close_finishes_the_jobs_that_wait() -> None:
    device = DeviceThread(max_queue_size=8)
    with ThreadPoolExecutor(1) as pool:
        with occupied(device):
            waiting = [device.submit(lambda number=number: number) for number in range(8)]  # type: ignore[misc]
            closing = pool.submit(device.close)
        closing.result(WAIT)
    assert all(future.done() for future in waiting)
    assert [future.result() for future in waiting] == list(range(8))


def _fail_with(tensor: np.ndarray) -> None:
    raise ValueError(f"cannot use {tensor.shape}")


@pytest.mark.parametrize("end", ["result", "exception", "cancelled", "expired"])
def test_no_tensor_outlives_its_job(device: DeviceThread, end: str) -> None:
    def submit() -> tuple[weakref.ref[np.ndarray], Future[object]]:
        tensor = np.ones(1000)
        work: Callable[[], object] = (lambda: _fail_with(tensor)) if end == "exception" else (lambda: tensor.sum())
        return weakref.ref(tensor), device.submit(work, time.monotonic() - 1 if end == "expired" else None)

    gc.disable()  # a cycle would be found too late: a GPU's memory is gone long before Python's collector runs
    try:
        with occupied(device):
            tensor, job = submit()
            assert tensor() is not None
            if end == "cancelled":
                job.cancel()
        if end != "cancelled":
            job.exception(WAIT)
        del job
        patience = time.monotonic() + 10
        # No other job comes that would take its place; the thread lets go of it on its own, a moment after the answer.
        while tensor() is not None and time.monotonic() < patience:
            time.sleep(0.001)
        assert tensor() is None
    finally:
        gc.enable()


def test_each_of_many_submitters_gets_its_own_result() -> None:
    device = DeviceThread(max_queue_size=10_000)
    running = 0

    def work(number: int) -> int:
        nonlocal running
        running += 1
        assert running == 1  # never two at once
        running -= 1
        if number % 7 == 0:
            raise KeyError(number)
        return number * number

    def submitter(start: int) -> list[object]:
        futures = [device.submit(lambda n=n: work(n)) for n in range(start, start + 200)]  # type: ignore[misc]
        return [future.exception(WAIT) or future.result() for future in futures]

    try:
        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(submitter, range(0, 3200, 200)))
    finally:
        device.close()
    for number, result in enumerate(result for part in results for result in part):
        if number % 7 == 0:
            assert isinstance(result, KeyError)
            assert result.args == (number,)
        else:
            assert result == number * number
