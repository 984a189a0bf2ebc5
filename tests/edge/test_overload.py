"""Too many requests, too little time, clients that leave: each gets its own status and harms nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from edge.pb import telemetry_pb2, telemetry_pb2_grpc
from tests.support.busy_model import QUEUE_SIZE, Stub, busy, failures
from tests.support.metrics import wait_until

#: What it says concerns the protocol, whatever carries it.
ON_EVERY_TRANSPORT = True


def test_a_full_queue_refuses_and_recovers(
    stub: Stub, telemetry: telemetry_pb2_grpc.TelemetryStub, take: Callable[[float], int]
) -> None:
    first = stub.ModelInfer.future(busy(take(2.0)))
    time.sleep(0.1)  # it is the first to arrive
    others = [stub.ModelInfer.future(busy(1)) for _ in range(QUEUE_SIZE + 20)]
    codes = [other.code() for other in others]
    assert first.code() is grpc.StatusCode.OK
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    # As many may wait as the queue holds; more get through only if the first ends before the last of them arrives.
    assert codes.count(grpc.StatusCode.OK) >= QUEUE_SIZE
    refused = next(other for other in others if other.code() is not grpc.StatusCode.OK)
    assert "waiting requests" in refused.details()
    assert wait_until(lambda: telemetry.Get(telemetry_pb2.GetRequest()).queue_depth == 0, 10)
    assert stub.ModelInfer(busy(1)).raw_output_contents[0] == np.int64(1).tobytes()


@pytest.mark.parametrize("how", ["parameter", "deadline"])
def test_time_runs_out_in_the_queue_and_not_after_it(stub: Stub, take: Callable[[float], int], how: str) -> None:
    before = failures(stub)
    long = stub.ModelInfer.future(busy(take(1.5)))
    time.sleep(0.1)
    request, timeout = (busy(1, timeout_us=100_000), 30) if how == "parameter" else (busy(1), 0.1)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=timeout)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not long.done()  # the answer did not wait for the job that runs
    assert long.result().raw_output_contents
    assert wait_until(lambda: failures(stub) == before + 1, 10)


def test_the_earlier_of_two_deadlines_wins(stub: Stub, take: Callable[[float], int]) -> None:
    long = stub.ModelInfer.future(busy(take(1.5)))
    time.sleep(0.1)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(busy(1, timeout_us=60_000_000), timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert long.result().raw_output_contents


def test_a_cancelled_request_harms_no_neighbour(stub: Stub, take: Callable[[float], int]) -> None:
    before = failures(stub)
    long = stub.ModelInfer.future(busy(take(0.5)))
    waiting = [stub.ModelInfer.future(busy(number)) for number in range(1, 7)]
    time.sleep(0.1)
    for index in (1, 4):
        assert waiting[index].cancel()
    answers = [np.frombuffer(w.result().raw_output_contents[0], np.int64)[0] for w in waiting if not w.cancelled()]
    assert answers == [1, 3, 4, 6]
    assert long.result().raw_output_contents
    assert wait_until(lambda: failures(stub) == before + 2, 10)


def test_a_cancelled_running_request_is_counted_and_forgotten(stub: Stub, take: Callable[[float], int]) -> None:
    before = failures(stub)
    running = stub.ModelInfer.future(busy(take(0.5)))
    time.sleep(0.1)
    running.cancel()
    assert stub.ModelInfer(busy(3)).raw_output_contents[0] == np.int64(3).tobytes()
    assert wait_until(lambda: failures(stub) == before + 1, 10)
