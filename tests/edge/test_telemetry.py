"""Telemetry of a server over gRPC and on the Prometheus page: refused requests, tiers, streams, NaN, sensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge.errors import DeadlineExceeded, Overloaded
from edge.instruments.metrics import NONFINITE
from edge.instruments.snapshot import STAGES
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from edge.scheduling.job import expired
from edge.server import Ready
from edge.telemetry.metrics import _SENSORS
from tests.support.in_process import running_service
from tests.support.metrics import page_of, wait_until
from tests.support.sample_requests import good, text
from tests.support.server_models import busy, echo_input, write_busy_bundle, write_echo_bundle
from tests.support.text_model import write_sentiment_bundle

Stub = inference_pb2_grpc.GRPCInferenceServiceStub
Get = Callable[[], telemetry_pb2.Reading]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """A server of its own, because these tests compare its counters."""
    directory = tmp_path_factory.mktemp("telemetry")
    write_sentiment_bundle(directory / "sentiment")
    write_busy_bundle(directory)
    write_echo_bundle(directory, "FP32")
    bundles = [directory / name for name in ("sentiment", "busy-1", "echo-fp32-1")]
    with running_server(bundles, cache=directory / "cache") as ready:
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


def echo(*numbers: float) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="echo-fp32")
    request.inputs.add(name=echo_input("FP32"), datatype="FP32", shape=[len(numbers)])
    request.raw_input_contents.append(np.array(numbers, np.float32).tobytes())
    return request


async def test_requests_that_fail_early_are_counted_by_reason_and_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Overloaded("queue", given=1, expected="0", fix="Wait.", cause="bytes")
    failures = Mock(side_effect=[ZeroDivisionError(), full, expired(1)])
    monkeypatch.setattr("edge.serving.wire.Sent.decode", failures)
    async with running_service(tmp_path) as running:
        for kind in (ZeroDivisionError, Overloaded, DeadlineExceeded):
            with pytest.raises(kind):
                await running.infer(good())
        now = running.counted()
    assert now.failures == {"ZeroDivisionError": 1, "Overloaded": 1, "DeadlineExceeded": 1}
    assert now.drops == {("Overloaded", "bytes"): 1, ("DeadlineExceeded", "refused"): 1}


def test_latency_by_tier(observed: Ready, stub: Stub, reading: Get) -> None:
    def counts(server: Ready) -> dict[str, float]:
        name = "fewheads_tier_duration_seconds_count"
        return {labels["tier"]: count for labels, count in samples(server, name, stage="compute_infer")}

    for tier in ("full", "full", "lean", "lean", "lean"):
        stub.ModelInfer(text("good good", tier=tier))
    of_tiers = {latency.tier: latency.stages for latency in model(reading(), "sentiment").tier_latencies}
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


def test_sensors_of_this_machine(observed: Ready, reading: Get) -> None:
    assert wait_until(lambda: any((s.kind, s.name) == ("utilization", "cpu") for s in reading().sensors))
    now = reading()
    (cpu,) = [sensor for sensor in now.sensors if (sensor.kind, sensor.name) == ("utilization", "cpu")]
    assert (0 <= cpu.value <= 1, cpu.unit, cpu.source) == (True, "ratio", "/proc/stat")
    assert 0 <= value(observed, "fewheads_utilization_ratio", unit="cpu") <= 1
    assert sum(len(samples(observed, name)) for name, *_ in _SENSORS.values()) == len(now.sensors)
