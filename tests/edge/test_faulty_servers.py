"""Servers whose runner fails: their responses, their health and their exit code."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from edge.bundles.expression import TOKENS
from edge.pb import inference_pb2 as pb
from tests.support.faulty_runners import ILLEGAL
from tests.support.in_process import write_failing_bundle
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_processes import (
    NOT_SERVING,
    SERVING,
    Served,
    health,
    is_ready,
    model_states,
    problems,
    served,
)

NAME = "oracle"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_oracle_bundle(tmp_path / "repository" / "oracle", NAME, 1).path.parent


def request(number: float = 1.0) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=NAME)
    message.inputs.add(name="x", datatype="FP32", shape=[1, TOKENS])
    message.raw_input_contents.append(np.full((1, TOKENS), number, np.float32).tobytes())
    return message


def test_lost_device_is_reported_and_ends_the_process(repository: Path) -> None:
    with served(repository, program="tests.support.faulty_runners lost") as server:
        server.stub.ModelInfer(request())
        assert is_ready(server)
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.ModelInfer(request(-20_000))
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


def fail(server: Served, number: float, times: int) -> None:
    for _ in range(times):
        with pytest.raises(grpc.RpcError):
            server.stub.ModelInfer(request(number))


def test_model_that_fails_on_golden_inputs_is_not_ready_until_it_recovers(repository: Path) -> None:
    with served(repository, program="tests.support.faulty_runners worn-out") as server:
        fail(server, -20_000, 2)
        assert is_ready(server)
        fail(server, -20_000, 1)
        assert wait_until(lambda: not is_ready(server), 5)
        ((state, reason),) = model_states(server).values()
        assert (state, reason) == ("UNAVAILABLE", f"tier full fails: RuntimeError: {ILLEGAL}")
        assert problems(server) == [f"{NAME}:1: {reason}"]
        assert wait_until(lambda: health(server, NAME) == NOT_SERVING, 2)
        server.stub.ModelInfer(request(20_000))
        assert is_ready(server)
        assert problems(server) == []
        assert wait_until(lambda: health(server, NAME) == SERVING, 2)


def test_bad_requests_leave_the_model_ready(tmp_path: Path) -> None:
    """An index beyond the table makes the runtime fail, but the model is fine."""
    write_failing_bundle(tmp_path)
    wrong = pb.ModelInferRequest(model_name="failing")
    wrong.inputs.add(name="index", datatype="INT64", shape=[1])
    wrong.raw_input_contents.append(np.int64(4).tobytes())
    with served(tmp_path) as server:
        for _ in range(3):
            for _ in range(8):
                with pytest.raises(grpc.RpcError) as caught:
                    server.stub.ModelInfer(wrong)
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert is_ready(server)
            assert not wait_until(lambda: not is_ready(server), 0.4)
        assert problems(server) == []
