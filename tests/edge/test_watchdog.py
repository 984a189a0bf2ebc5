"""Runs that do not end, and shutdowns that would wait for them, on servers of their own."""

import os
import re
import signal
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2, telemetry_pb2_grpc
from tests.support import server_processes
from tests.support.metrics import gauge, wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_models import busy, write_busy_bundle
from tests.support.server_processes import NOT_SERVING, SERVING, is_ready, model_states, problems, served

#: Between 0.8 s and 4 s; nothing longer may come before, since the usual time of a tier raises its limit.
LONG = 4000
#: Many minutes on any machine.
FOR_EVER = 10**9


@pytest.fixture
def repository(tmp_path):
    directory = tmp_path / "repository"
    write_busy_bundle(directory)
    write_oracle_bundle(directory / "oracle", "oracle", 1)
    return directory


def test_long_run_makes_the_server_unready_until_it_ends(repository):
    def healths(server):
        return {server_processes.health(server, name) for name in ("", "busy", "oracle")}

    with served(repository, "--watchdog-seconds=0.3", "--instances=1") as server:
        assert (is_ready(server), problems(server)) == (True, [])
        long = server.stub.ModelInfer.future(busy(LONG))
        assert wait_until(lambda: not is_ready(server), 10)
        ((problem,), states) = problems(server), model_states(server)
        # The limit is 0.3 s, or ten times the usual time where that is more.
        assert re.fullmatch(r"a run of busy:1 \(tier full\) takes longer than its limit of \d\.\d s", problem)
        # It occupies the only worker, so the other model is not computed either.
        assert states == {"busy": ("UNAVAILABLE", problem), "oracle": ("UNAVAILABLE", problem)}
        assert not server.stub.ModelReady(pb.ModelReadyRequest(name="busy")).ready
        assert gauge(server.ready, "problems") == 1
        assert wait_until(lambda: healths(server) == {NOT_SERVING}, 2)
        assert long.result().raw_output_contents[0] == np.int64(LONG).tobytes()
        assert (is_ready(server), problems(server)) == (True, [])
        assert wait_until(lambda: healths(server) == {SERVING}, 2)


def test_only_the_stuck_model_is_unready_while_a_worker_is_left(repository):
    with served(repository, "--watchdog-seconds=0.3", "--instances=2", "--stuck-exit-seconds=inf") as server:
        call = server.stub.ModelInfer.future(busy(FOR_EVER))
        assert wait_until(lambda: not is_ready(server), 10)
        states = {name: state for name, (state, _) in model_states(server).items()}
        assert states == {"busy": "UNAVAILABLE", "oracle": "READY"}
        assert not call.done()


def test_run_that_never_ends_ends_the_process(repository):
    with served(repository, "--watchdog-seconds=0.2", "--stuck-exit-seconds=0.2") as server:
        call = server.stub.ModelInfer.future(busy(FOR_EVER))
        code, log = server.end()
        assert code == 9
        (line,) = [line for line in log.splitlines() if line.startswith("fewheads: ")]
        assert line.startswith("fewheads: server: got a run of busy:1 (tier full) takes longer than")
        assert "onnxruntime_runner.py" in log  # the stack of the thread
        assert call.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_sigterm_ends_a_run_that_never_ends(repository):
    with served(repository, "--drain-seconds=0.2") as server:
        call = server.stub.ModelInfer.future(busy(FOR_EVER))
        time.sleep(0.5)
        begun = time.monotonic()
        os.kill(server.ready.process_id, signal.SIGTERM)
        code, log = server.end()
        assert code == 10
        assert 3 < time.monotonic() - begun < 6
        assert "shutdown: got a run of busy:1 (tier full) after " in log.splitlines()[-1]
        assert "expected an end within 3.2 s" in log.splitlines()[-1]
        assert call.code() is not grpc.StatusCode.OK


def test_watchers_neither_delay_a_shutdown_nor_harm_each_other(repository):
    with served(repository, "--drain-seconds=30", "--model-control=explicit") as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest(service="oracle")) for _ in range(2))
        assert (next(leaving).status, next(staying).status) == (NOT_SERVING, NOT_SERVING)
        leaving.cancel()
        time.sleep(0.1)
        server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"))
        while next(staying).status != SERVING:
            pass
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="zz"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watching = [
            telemetry_pb2_grpc.TelemetryStub(server.channel).Watch(telemetry_pb2.WatchRequest(interval_ms=20_000)),
            stub.Watch(health_pb2.HealthCheckRequest(service="")),
        ]
        assert all(next(stream) for stream in watching)
        begun = time.monotonic()
        os.kill(server.ready.process_id, signal.SIGTERM)
        with pytest.raises(grpc.RpcError, match="going down"):
            next(watching[0])
        assert next(watching[1]).status == NOT_SERVING
        with pytest.raises(grpc.RpcError, match="going down"):
            next(watching[1])
        assert server.end()[0] == 0
        assert time.monotonic() - begun < 5
