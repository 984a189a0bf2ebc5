"""Health computed from a lost device, stuck runs and failing models; servers whose runner fails."""

import math
import threading
import time

import grpc
import numpy as np
import pytest

from edge.bundles.expression import TOKENS
from edge.errors import DeviceFailed, ModelNotReady, RunStuck
from edge.health.health import Health
from edge.repository.control import ModelControl
from edge.repository.loader import Loader
from edge.repository.repository import Repository
from edge.scheduling.runs import Run
from tests.support.conditions import ILLEGAL, Faulty
from tests.support.in_process import write_oracle_and_failing_bundle
from tests.support.jobs import WAIT, executor_of, job_of, occupied, output, submitted
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle
from tests.support.sample_requests import raw_request
from tests.support.server_processes import NOT_SERVING, SERVING, health, is_ready, model_states, problems, served


def health_of(scheduler, tmp_path, seconds=math.inf):
    return Health(Repository(tmp_path, Loader(scheduler)), scheduler.runs, watchdog_seconds=seconds)


def faulty_executor(**options):
    runner = Faulty()
    return executor_of(lambda x: runner.infer({"x": x})["y"], on_gpu=True, **options)


def test_lost_device_rejects_waiting_and_new_requests(scheduler, tmp_path):
    health, executor = health_of(scheduler, tmp_path), faulty_executor()
    assert output(submitted(scheduler, job_of(executor, 1))) == 1
    assert health.server_sound()
    with occupied(scheduler):
        culprit = submitted(scheduler, job_of(executor, -1_010))
        waiting = [submitted(scheduler, job_of(executor, 1)) for _ in range(3)]
        cancelled = submitted(scheduler, job_of(executor, 1))
        cancelled.cancel()
    assert isinstance(culprit.exception(WAIT), RuntimeError)
    for job in waiting:
        error = job.exception(WAIT)
        assert isinstance(error, ModelNotReady)
        assert ILLEGAL in str(error)
        assert "Use another server" in error.fix
    with pytest.raises(ModelNotReady, match="illegal memory access"):
        scheduler.submit(job_of(executor, 1))
    assert (len(scheduler.queue), health.server_sound()) == (0, False)
    assert health.problems() == [f"the device is lost: CUDA_ERROR_ILLEGAL_ADDRESS: {ILLEGAL}"]
    failure = health.failure(math.inf)
    assert isinstance(failure, DeviceFailed)
    assert failure.exit_code == 8


def test_lost_device_rejects_all_requests_of_a_run(scheduler):
    executor = faulty_executor(max_rows=8)
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(executor, value)) for value in (1, -1_010, 2)]
    # They are not repeated one by one, as after other errors.
    assert [type(job.exception(WAIT)) for job in jobs] == [ModelNotReady] * 3


def test_own_work_may_lose_the_device(scheduler):
    with pytest.raises(RuntimeError):
        scheduler.call(lambda: Faulty().infer({"x": np.array([-2e4])}))  # as when a model is loaded
    assert scheduler.runs.lost == f"CUDA_ERROR_ILLEGAL_ADDRESS: {ILLEGAL}"


def test_run_beyond_its_limit_is_stuck(scheduler, tmp_path):
    health = health_of(scheduler, tmp_path, seconds=0.2)
    go = threading.Event()
    executor = executor_of(lambda x: x if go.wait(WAIT) else -x)
    job = submitted(scheduler, job_of(executor, 1))
    time.sleep(0.05)
    assert health.server_sound()
    assert wait_until(lambda: not health.server_sound(), 5)
    assert health.failure(math.inf) is None
    failure = health.failure(0.0)
    assert isinstance(failure, RunStuck)
    assert failure.exit_code == 9
    assert "(tier full) takes longer than its limit of 0.2 s: " in str(failure)
    assert "(tier full) after " in str(health.drain_timeout(3))
    go.set()
    job.result(WAIT)
    assert health.server_sound()
    assert health.failure(0.0) is None
    assert "got models that still load or close, expected an end within 3 s" in str(health.drain_timeout(3))


def test_slow_tier_has_a_higher_limit(scheduler, tmp_path):
    health, executor = health_of(scheduler, tmp_path, seconds=0.05), executor_of(lambda x: x)
    for _ in range(8):
        executor.latency.observe(1, 0.1)  # its limit is 1.05 s
    for seconds, sound in ((0.9, True), (1.1, False)):
        scheduler.runs.now[0] = Run(time.monotonic() - seconds, executor, 1)
        assert health.server_sound() is sound


async def test_shutdown_loads_no_further_model(scheduler, tmp_path):
    for name in ("a", "b", "c"):
        write_oracle_bundle(tmp_path / "repository" / name, name, 1)
    repository = Repository(tmp_path / "repository", Loader(scheduler, "onnxruntime", tmp_path / "cache"))
    control = ModelControl(repository, "none")

    def on_change():
        control.stopping = [entry.state for entry in repository].count("READY") == 2

    repository.on_change = on_change
    await control.start()
    assert {entry.name: entry.state for entry in repository} == {"a": "READY", "b": "READY", "c": "LOADING"}
    await control.close()
    assert [entry.model for entry in repository] == [None] * 3


NAME = "oracle"


@pytest.fixture
def repository(tmp_path):
    return write_oracle_bundle(tmp_path / "repository" / "oracle", NAME, 1).path.parent


def request(number=1.0):
    return raw_request(NAME, x=np.full((1, TOKENS), number, np.float32))


def test_lost_device_is_reported_and_ends_the_process(repository):
    with served(repository, program="tests.support.conditions runner lost") as server:
        server.stub.ModelInfer(request())
        assert is_ready(server)
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.ModelInfer(request(-1_010))
        assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
        assert not is_ready(server)
        assert problems(server) == [f"the device is lost: CUDA_ERROR_ILLEGAL_ADDRESS: {ILLEGAL}"]
        assert model_states(server) == {NAME: ("UNAVAILABLE", f"CUDA_ERROR_ILLEGAL_ADDRESS: {ILLEGAL}")}
        with pytest.raises(grpc.RpcError, match="a device that computes") as caught:
            server.stub.ModelInfer(request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert wait_until(lambda: health(server, "") == NOT_SERVING, 1.5)
        code, log = server.end()
        assert code == 8
        expected = f"fewheads: server: got CUDA_ERROR_ILLEGAL_ADDRESS: {ILLEGAL}, expected a device"
        assert log.splitlines()[-1].startswith(expected)


def test_model_that_fails_on_golden_inputs_is_not_ready_until_it_recovers(repository):
    with served(repository, program="tests.support.conditions runner worn-out") as server:
        for _ in range(3):
            assert is_ready(server)
            with pytest.raises(grpc.RpcError):
                server.stub.ModelInfer(request(-1_010))
        assert wait_until(lambda: not is_ready(server), 5)
        ((state, reason),) = model_states(server).values()
        assert (state, reason) == ("UNAVAILABLE", f"tier full fails: RuntimeError: {ILLEGAL}")
        assert problems(server) == [f"{NAME}:1: {reason}"]
        assert wait_until(lambda: health(server, NAME) == NOT_SERVING, 2)
        server.stub.ModelInfer(request(1_010))
        assert is_ready(server)
        assert problems(server) == []
        assert wait_until(lambda: health(server, NAME) == SERVING, 2)


def test_bad_requests_leave_the_model_ready(tmp_path):
    """An index beyond the table makes the runtime fail, but the model is fine."""
    write_oracle_and_failing_bundle(tmp_path)
    wrong = raw_request("failing", index=np.array([4]))
    with served(tmp_path) as server:
        for _ in range(3):
            for _ in range(8):
                with pytest.raises(grpc.RpcError) as caught:
                    server.stub.ModelInfer(wrong)
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert is_ready(server)
            assert not wait_until(lambda: not is_ready(server), 0.4)
        assert problems(server) == []
