"""Health follows from what happened: failures in a row, a lost device, threads that end, each at the right moment."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.datatypes import Array
from edge.errors import DeviceFailed, FewheadsError, InvalidRequest, ModelNotReady, RunnerError, RunStuck
from edge.health.health import Health
from edge.repository.control import ModelControl
from edge.repository.repository import Repository
from edge.scheduling.failure_tracker import SUSPECT_AFTER
from edge.scheduling.lane import Lane
from edge.scheduling.scheduler import Scheduler
from tests.support.faulty_runners import ILLEGAL, Faulty
from tests.support.lanes import WAIT, job_of, lane_of, occupied, output, submitted
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(100)
    yield scheduler
    scheduler.close()


def health_of(scheduler: Scheduler, tmp_path: Path, seconds: float = math.inf) -> Health:
    return Health(Repository(tmp_path, scheduler), scheduler.runs, watchdog_seconds=seconds)


def faulty_lane(**options: Any) -> Lane:
    runner = Faulty()
    return lane_of(lambda x: runner.infer({"x": x})["y"], on_gpu=runner.device == "GPU", **options)


def test_a_lost_device_refuses_all_that_wait_and_all_that_come(scheduler: Scheduler, tmp_path: Path) -> None:
    health, lane = health_of(scheduler, tmp_path), faulty_lane()
    assert output(submitted(scheduler, job_of(lane, 1))) == 1
    assert health.server_sound()
    with occupied(scheduler):
        culprit = submitted(scheduler, job_of(lane, -20_000))
        waiting = [submitted(scheduler, job_of(lane, 1)) for _ in range(3)]
        cancelled = submitted(scheduler, job_of(lane, 1))
        cancelled.cancel()
    assert isinstance(culprit.exception(WAIT), RuntimeError)
    for job in waiting:
        error = job.exception(WAIT)
        assert isinstance(error, ModelNotReady)
        assert ILLEGAL in str(error)
        assert "Ask another server" in error.fix
    with pytest.raises(ModelNotReady, match="illegal memory access"):
        scheduler.submit(job_of(lane, 1))
    assert (scheduler.depth, health.server_sound()) == (0, False)
    assert health.problems() == [f"nothing can be computed any more: CUDA_ERROR_ILLEGAL_ADDRESS: {ILLEGAL}"]
    failure = health.failure(math.inf)
    assert isinstance(failure, DeviceFailed)
    assert failure.exit_code == 8


def test_requests_that_share_a_run_with_the_last_one_are_refused_too(scheduler: Scheduler) -> None:
    lane = faulty_lane(max_rows=8)
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(lane, value)) for value in (1, -20_000, 2)]
    errors = [job.exception(WAIT) for job in jobs]
    # Nothing is repeated on a device that is gone.
    assert [type(error) for error in errors] == [ModelNotReady] * 3


def test_an_error_while_a_model_is_loaded_counts_too(scheduler: Scheduler) -> None:
    with pytest.raises(RuntimeError):
        scheduler.call(lambda: Faulty().infer({"x": np.array([-2e4])}))
    assert ILLEGAL in scheduler.runs.lost


def test_a_processor_is_never_lost_by_a_text(scheduler: Scheduler) -> None:
    runner = Faulty()
    with pytest.raises(RuntimeError):
        submitted(scheduler, job_of(lane_of(lambda x: runner.infer({"x": x})["y"]), -20_000)).result(WAIT)
    assert not scheduler.runs.lost


class Deadly(Exception):
    pass


def test_a_thread_that_ends_is_noticed(scheduler: Scheduler, tmp_path: Path) -> None:
    class Repeats(float):
        def __sub__(self, other: float) -> float:
            raise Deadly

    lane = lane_of(lambda x: x, repeats=Repeats(1))
    with occupied(scheduler):
        job = submitted(scheduler, job_of(lane, 1))
        waiting = submitted(scheduler, job_of(lane, 1))
    assert output(job) == 1  # it was computed before its thread ended
    assert isinstance(waiting.exception(WAIT), ModelNotReady)
    assert "the thread device-0 ended by Deadly" in str(health_of(scheduler, tmp_path).failure(math.inf))


def test_a_run_is_overdue_after_the_limit_and_not_before(scheduler: Scheduler, tmp_path: Path) -> None:
    health = health_of(scheduler, tmp_path, seconds=0.2)
    go = threading.Event()
    lane = lane_of(lambda x: x if go.wait(WAIT) else -x)
    job = submitted(scheduler, job_of(lane, 1))
    time.sleep(0.05)
    assert health.server_sound()
    assert wait_until(lambda: not health.server_sound(), 5)
    assert health.failure(math.inf) is None
    failure = health.failure(0.0)
    assert isinstance(failure, RunStuck)
    assert failure.exit_code == 9
    go.set()
    job.result(WAIT)
    assert health.server_sound()
    assert health.failure(0.0) is None


def test_a_tier_that_is_usually_slow_has_more_time(scheduler: Scheduler, tmp_path: Path) -> None:
    health = health_of(scheduler, tmp_path, seconds=0.05)

    def work(rows: Array) -> Array:
        time.sleep(0.15)
        return rows

    lane = lane_of(work)
    for _ in range(8):
        lane.latency.observe(1, 0.1)  # ten times more is a second
    job = submitted(scheduler, job_of(lane, 1))
    while not job.done():
        assert health.server_sound()
        time.sleep(0.01)


def test_failures_in_a_row_make_a_tier_suspect_and_a_success_clears_it(scheduler: Scheduler) -> None:
    error: list[FewheadsError | None] = [RunnerError("m", given=1, expected="2", fix="3.")]

    def work(rows: Array) -> Array:
        if error[0]:
            raise error[0]
        return rows

    lane = lane_of(work)
    for count in range(SUSPECT_AFTER):
        assert (lane.failures.count, lane.failures.suspect) == (count, False)
        assert submitted(scheduler, job_of(lane, 1)).exception(WAIT)
    assert lane.failures.suspect
    lane.failures.mark_broken("it is broken")
    error[0] = None
    submitted(scheduler, job_of(lane, 1)).result(WAIT)
    assert (lane.failures.suspect, lane.failures.broken) == (False, "")
    error[0] = InvalidRequest("x", given=1, expected="2", fix="3.")
    for _ in range(2 * SUSPECT_AFTER):
        assert submitted(scheduler, job_of(lane, 1)).exception(WAIT)
    assert not lane.failures.suspect


def test_a_run_of_several_that_fails_counts_only_for_its_culprit(scheduler: Scheduler) -> None:
    def work(rows: Array) -> Array:
        if rows.min() < 0:
            raise ValueError
        return rows

    lane = lane_of(work, max_rows=8)
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(lane, value)) for value in (1, -1, 2, -2)]
    assert [bool(job.exception(WAIT)) for job in jobs] == [False, True, False, True]
    assert lane.failures.count == 1  # the one after the last success


async def test_a_shutdown_begins_with_no_further_model(tmp_path: Path) -> None:
    device = Scheduler(1, device_bound=False)
    for name in ("a", "b", "c"):
        write_oracle_bundle(tmp_path / "repository" / name, name, 1)
    repository = Repository(tmp_path / "repository", device, target="onnxruntime", cache=tmp_path / "cache")
    control = ModelControl(repository, "none")

    def on_change() -> None:
        control.stopping = [entry.state for entry in repository].count("READY") == 2

    repository.on_change = on_change
    await control.start()
    assert {entry.name: entry.state for entry in repository} == {"a": "READY", "b": "READY", "c": "LOADING"}
    await control.close()
    assert [entry.model for entry in repository] == [None] * 3
    device.close()
