"""Telemetry of a server over gRPC and on the Prometheus page: drops, peaks, tiers, streams, NaN, sensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge.instruments.metrics import NONFINITE
from edge.instruments.snapshot import STAGES
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from edge.server import Ready
from edge.telemetry.metrics import _SENSORS
from tests.support.busy_model import busy
from tests.support.inference_service import running_service
from tests.support.metrics import page_of, wait_until
from tests.support.open_stream import Sender
from tests.support.sample_requests import good, text
from tests.support.server_models import echo_input, write_busy_bundle, write_echo_bundle
from tests.support.text_model import write_sentiment_bundle

Stub = inference_pb2_grpc.GRPCInferenceServiceStub
Get = Callable[[], telemetry_pb2.Reading]
QUEUE_BYTES = 64
#: Measured durations of a step of the busy model.
STEP_SECONDS: list[float] = []


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """A server of its own, because these tests compare its counters."""
    directory = tmp_path_factory.mktemp("telemetry")
    write_sentiment_bundle(directory / "sentiment")
    write_busy_bundle(directory)
    write_echo_bundle(directory, "FP32")
    bundles = [directory / name for name in ("sentiment", "busy-1", "echo-fp32-1")]
    arguments = ["--instances=1", "--max-queue-size=5", f"--max-queue-bytes={QUEUE_BYTES}"]
    with running_server(bundles, cache=directory / "cache", arguments=arguments) as ready:
        yield ready


@pytest.fixture
def url(observed: Ready) -> str:
    return f"127.0.0.1:{observed.grpc_port}"


@pytest.fixture
def reading(telemetry: telemetry_pb2_grpc.TelemetryStub) -> Get:
    return lambda: telemetry.Get(telemetry_pb2.GetRequest())


def model(reading: telemetry_pb2.Reading, name: str) -> telemetry_pb2.ModelReading:
    (found,) = [model for model in reading.models if model.name == name]
    return found


def samples(server: Ready, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
    families = text_string_to_metric_families(page_of(server))
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(sample.labels, sample.value) for sample in found if labels.items() <= sample.labels.items()]


def value(server: Ready, name: str, **labels: str) -> float:
    return samples(server, name, **labels)[0][1]


def hold(stub: Stub) -> grpc.Future:
    for _ in range(3):
        begun = time.perf_counter()
        stub.ModelInfer(busy(50))
        STEP_SECONDS.append((time.perf_counter() - begun) / 50)
    call = stub.ModelInfer.future(busy(int(0.6 / min(STEP_SECONDS))))
    time.sleep(0.05)
    return call


def drops(model: telemetry_pb2.ModelReading) -> dict[tuple[str, str], int]:
    return {(drop.reason, drop.place): drop.count for drop in model.drops}


def echo(*numbers: float) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="echo-fp32")
    request.inputs.add(name=echo_input("FP32"), datatype="FP32", shape=[len(numbers)])
    request.raw_input_contents.append(np.array(numbers, np.float32).tobytes())
    return request


class Drop(NamedTuple):
    request: pb.ModelInferRequest
    code: grpc.StatusCode
    timeout: float | None = None
    while_busy: bool = False
    before: Sequence[pb.ModelInferRequest] = ()


LATE = busy(1)
LATE.parameters["timeout"].int64_param = 1
FULL, TOO_LATE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED
CANCELLED = grpc.StatusCode.CANCELLED
#: Reason and place of a drop to its cause.
DROPS = {
    ("Overloaded", "requests"): Drop(busy(1), FULL, while_busy=True, before=[busy(1)] * 5),
    ("Overloaded", "bytes"): Drop(busy(1), FULL, while_busy=True, before=[echo(*range(QUEUE_BYTES // 4))]),
    ("Overloaded", "deadline"): Drop(busy(1, timeout_us=1000), FULL, while_busy=True),
    ("DeadlineExceeded", "refused"): Drop(LATE, TOO_LATE),
    ("DeadlineExceeded", "running"): Drop(busy(1000), TOO_LATE, timeout=0.05),
    ("Cancelled", "queued"): Drop(busy(1), CANCELLED, while_busy=True),
    ("Cancelled", "running"): Drop(busy(1000), CANCELLED),
}


@pytest.mark.parametrize("cause", DROPS, ids="-".join)
def test_drops_are_counted_by_reason_and_place(
    observed: Ready, stub: Stub, reading: Get, cause: tuple[str, str]
) -> None:
    drop = DROPS[cause]
    before = model(reading(), "busy")
    calls = [hold(stub)] if drop.while_busy else []
    calls += [stub.ModelInfer.future(request) for request in drop.before]
    time.sleep(0.05)
    call = stub.ModelInfer.future(drop.request, timeout=drop.timeout)
    if drop.code is CANCELLED:
        time.sleep(0.05)
        call.cancel()
    assert call.code() is drop.code
    assert wait_until(lambda: drops(model(reading(), "busy")).get(cause, 0) > drops(before).get(cause, 0))
    for earlier in calls:
        earlier.result()
    assert stub.ModelInfer(busy(1)).raw_output_contents  # waits until the worker is idle
    now = model(reading(), "busy")
    assert {key for key, count in drops(now).items() if count > drops(before).get(key, 0)} == {cause}
    assert now.failure_count - before.failure_count == sum(drops(now).values()) - sum(drops(before).values())
    reason, place = cause
    counted = value(observed, "fewheads_dropped_requests_total", model="busy", reason=reason, place=place)
    assert counted == drops(now)[cause]


async def test_internal_errors_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_service(tmp_path) as running:
        monkeypatch.setattr("edge.serving.inference.decode_inputs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await running.infer(good())
        assert running.counted().failures == {"ZeroDivisionError": 1}


def test_latency_by_tier(observed: Ready, stub: Stub, reading: Get) -> None:
    def counts(server: Ready) -> dict[str, float]:
        name = "fewheads_tier_duration_seconds_count"
        return {labels["tier"]: count for labels, count in samples(server, name, stage="compute_infer")}

    for tier in ("full", "full", "lean", "lean", "lean"):
        stub.ModelInfer(text("good good", tier=tier))
    sentiment = model(reading(), "sentiment")
    of_tiers = {latency.tier: latency.stages for latency in sentiment.tier_latencies}
    assert {tier: stages[0].count for tier, stages in of_tiers.items()} == {"full": 2, "lean": 3} == counts(observed)
    for stages in of_tiers.values():
        assert [stage.stage for stage in stages] == list(STAGES)
        assert 0 < stages[0].p50_ns <= stages[0].p95_ns <= stages[0].p99_ns
    stub.ModelInfer(busy(1))  # a model of one tier
    assert not model(reading(), "busy").tier_latencies


def test_nonfinite_outputs_are_counted_and_unchanged(observed: Ready, stub: Stub, reading: Get) -> None:
    for numbers, count in (([1, 2], 0), ([1, np.nan], 1), ([-np.inf], 2)):
        request = echo(*numbers)
        assert stub.ModelInfer(request).raw_output_contents == request.raw_input_contents
        now = model(reading(), "echo-fp32")
        assert now.nonfinite_count == value(observed, NONFINITE.name, model="echo-fp32") == count
        assert [m.value for m in now.metrics if m.name == NONFINITE.name] == [count]


def test_open_streams(stub: Stub, reading: Get) -> None:
    sender = Sender()
    answers = stub.ModelStreamInfer(iter(sender))
    assert wait_until(lambda: reading().streams == 1)
    sender.queue.put(None)
    assert not list(answers)
    assert wait_until(lambda: reading().streams == 0)


def test_sensors_of_this_machine(observed: Ready, reading: Get) -> None:
    assert wait_until(lambda: any((s.kind, s.name) == ("utilization", "cpu") for s in reading().sensors))
    now = reading()
    (cpu,) = [sensor for sensor in now.sensors if (sensor.kind, sensor.name) == ("utilization", "cpu")]
    assert (0 <= cpu.value <= 1, cpu.unit, cpu.source) == (True, "ratio", "/proc/stat")
    assert 0 <= value(observed, "fewheads_utilization_ratio", unit="cpu") <= 1
    assert sum(len(samples(observed, name)) for name, *_ in _SENSORS.values()) == len(now.sensors)
