"""Jobs: their sizes, and the end of their tensors and uses."""

import asyncio
import gc
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

from edge.scheduling.job import Job, JobResult, UseCount, expired, take_all
from tests.support.jobs import WAIT, Awaited, executor_of, job_of, occupied, submitted
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
