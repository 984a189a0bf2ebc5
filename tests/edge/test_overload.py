"""Too many requests, too little time, clients that leave: each gets its own status and harms no other."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from edge.pb import telemetry_pb2, telemetry_pb2_grpc
from tests.support.metrics import wait_until
from tests.support.server_models import QUEUE_SIZE, Stub, busy

#: The tests concern the protocol, whatever carries it.
ON_EVERY_TRANSPORT = True
Take = Callable[[float], int]


def answer(call: grpc.Future) -> int:
    return int(np.frombuffer(call.result().raw_output_contents[0], np.int64)[0])


def test_full_queue_rejects_requests_and_recovers(
    stub: Stub, telemetry: telemetry_pb2_grpc.TelemetryStub, take: Take
) -> None:
    first = stub.ModelInfer.future(busy(take(1.0)))
    time.sleep(0.1)  # it is the first to arrive
    others = [stub.ModelInfer.future(busy(1)) for _ in range(QUEUE_SIZE + 20)]
    codes = [other.code() for other in others]
    assert first.code() is grpc.StatusCode.OK
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    # The queue holds so many; more get through only if the first ends before the last of them arrives.
    assert codes.count(grpc.StatusCode.OK) >= QUEUE_SIZE
    rejected = next(other for other in others if other.code() is not grpc.StatusCode.OK)
    assert f"queue: got {QUEUE_SIZE} waiting requests" in rejected.details()
    (after_ms,) = [int(value) for key, value in rejected.trailing_metadata() if key == "retry-after-ms"]
    assert 1 <= after_ms < 10_000
    assert wait_until(lambda: telemetry.Get(telemetry_pb2.GetRequest()).queue_depth == 0, 10)
    assert answer(stub.ModelInfer.future(busy(1))) == 1


@pytest.mark.parametrize(("timeout_us", "timeout"), [(100_000, 30), (0, 0.1), (60_000_000, 0.1)])
def test_request_leaves_the_queue_at_its_earliest_deadline(
    stub: Stub, telemetry: telemetry_pb2_grpc.TelemetryStub, take: Take, timeout_us: int, timeout: float
) -> None:
    def reading() -> tuple[int, dict[tuple[str, str], int]]:
        now = telemetry.Get(telemetry_pb2.GetRequest())
        (model,) = [model for model in now.models if model.name == "busy"]
        return now.queue_bytes, {(drop.reason, drop.place): drop.count for drop in model.drops}

    key = ("DeadlineExceeded", "queued")
    before = reading()[1].get(key, 0)
    long = stub.ModelInfer.future(busy(take(0.8)))
    time.sleep(0.1)
    late = stub.ModelInfer.future(busy(1, timeout_us=timeout_us), timeout=timeout)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not long.done()
    assert wait_until(lambda: (reading()[0], reading()[1].get(key, 0)) == (0, before + 1), 10)
    assert answer(long) > 1
