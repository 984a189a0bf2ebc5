"""What a server tells of itself over gRPC and Prometheus alike: drops, peaks, tiers, streams, NaN, sensors."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from edge.instruments.metrics import METRICS, NONFINITE, ModelNow, RequestMetric
from edge.instruments.snapshot import STAGES
from edge.instruments.statistics import ModelStatistics
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from edge.repository.control import ModelControl
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.server import Ready
from edge.serving.inference import InferenceService
from edge.telemetry.metrics import BOARD_METRICS, SERVER_METRICS, families
from edge.telemetry.telemetry import request_metrics
from tests.edge.test_admission import text
from tests.edge.test_statistics import Request, reason_of
from tests.support.busy_model import busy
from tests.support.metrics import wait_until
from tests.support.server_models import echo_input, write_busy_bundle, write_echo_bundle
from tests.support.text_model import write_sentiment_bundle

Stub = inference_pb2_grpc.GRPCInferenceServiceStub
Telemetry = telemetry_pb2_grpc.TelemetryStub
Get = Callable[[], telemetry_pb2.Reading]
Hold = Callable[[float], grpc.Future]
Labels = dict[str, str]
QUEUE_BYTES = 64
README = Path(__file__).parent.parent.parent / "edge" / "README.md"
#: Of the busy model, as often as it was measured.
STEP_SECONDS: list[float] = []
FAMILIES = (
    "fewheads_temperature_celsius",
    "fewheads_power_watts",
    "fewheads_utilization_ratio",
    "fewheads_frequency_hertz",
    "fewheads_frequency_limit_hertz",
    "fewheads_fan_ratio",
    "fewheads_fan_speed_rpm",
    "fewheads_throttling_level",
    "fewheads_throttling_events_total",
)


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """A server of its own, so that what it counts is what is asked here."""
    directory = tmp_path_factory.mktemp("telemetry")
    write_sentiment_bundle(directory / "sentiment")
    write_busy_bundle(directory)
    write_echo_bundle(directory, "FP32")
    bundles = [directory / name for name in ("sentiment", "busy-1", "echo-fp32-1")]
    arguments = ["--instances=1", "--max-queue-size=5", f"--max-queue-bytes={QUEUE_BYTES}"]
    with running_server(bundles, cache=directory / "cache", arguments=arguments) as ready:
        yield ready


@pytest.fixture(scope="module")
def channel(telling: Ready) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{telling.grpc_port}") as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Stub:
    return Stub(channel)


@pytest.fixture(scope="module")
def reading(channel: grpc.Channel) -> Get:
    telemetry = Telemetry(channel)
    return lambda: telemetry.Get(telemetry_pb2.GetRequest())


def model(reading: telemetry_pb2.Reading, name: str) -> telemetry_pb2.ModelReading:
    (found,) = [model for model in reading.models if model.name == name]
    return found


def samples(server: Ready, name: str, **labels: str) -> list[tuple[Labels, float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=20) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(sample.labels, sample.value) for sample in found if labels.items() <= sample.labels.items()]


def value(server: Ready, name: str, **labels: str) -> float:
    ((_, number),) = samples(server, name, **labels)
    return number


@pytest.fixture
def hold(stub: Stub) -> Hold:
    """Keep the one worker busy for about so many seconds, or longer where a neighbour takes the processor."""
    for _ in range(3):
        begun = time.perf_counter()
        stub.ModelInfer(busy(50))
        STEP_SECONDS.append((time.perf_counter() - begun) / 50)

    def hold(seconds: float) -> grpc.Future:
        call = stub.ModelInfer.future(busy(int(seconds / min(STEP_SECONDS))))
        time.sleep(0.05)
        return call

    return hold


def drops(model: telemetry_pb2.ModelReading) -> dict[tuple[str, str], int]:
    return {(drop.reason, drop.place): drop.count for drop in model.drops}


def echo(*numbers: float) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="echo-fp32")
    request.inputs.add(name=echo_input("FP32"), datatype="FP32", shape=[len(numbers)])
    request.raw_input_contents.append(np.array(numbers, np.float32).tobytes())
    return request


def over_requests(stub: Stub) -> None:
    calls = [stub.ModelInfer.future(busy(1)) for _ in range(6)]
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in [call.code() for call in calls]


def over_bytes(stub: Stub) -> None:
    waiting = stub.ModelInfer.future(echo(*range(QUEUE_BYTES // 4)))
    time.sleep(0.05)
    assert stub.ModelInfer.future(busy(1)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    waiting.cancel()


def over_the_deadline(stub: Stub) -> None:
    assert stub.ModelInfer.future(busy(1, timeout_us=1000)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def late_already(stub: Stub) -> None:
    request = busy(1)
    request.parameters["timeout"].int64_param = 1
    assert stub.ModelInfer.future(request).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def cancelled_in_the_queue(stub: Stub) -> None:
    call = stub.ModelInfer.future(busy(1))
    time.sleep(0.05)
    call.cancel()


def cancelled_while_it_runs(stub: Stub) -> None:
    running = stub.ModelInfer.future(busy(1000))
    time.sleep(0.05)
    running.cancel()


def late_while_it_runs(stub: Stub) -> None:
    assert stub.ModelInfer.future(busy(1000), timeout=0.05).code() is grpc.StatusCode.DEADLINE_EXCEEDED


#: What is done, whether while the worker is busy, and how it is counted. What leaves the queue for want of time, and
#: clients that leave it, test_admission.py tries in every way.
DROPS = {
    ("Overloaded", "requests"): (over_requests, True),
    ("Overloaded", "bytes"): (over_bytes, True),
    ("Overloaded", "deadline"): (over_the_deadline, True),
    ("DeadlineExceeded", "refused"): (late_already, False),
    ("DeadlineExceeded", "running"): (late_while_it_runs, False),
    ("Cancelled", "queued"): (cancelled_in_the_queue, True),
    ("Cancelled", "running"): (cancelled_while_it_runs, False),
}


@pytest.mark.parametrize("cause", DROPS, ids="-".join)
def test_every_cause_of_a_drop_is_counted(
    telling: Ready, stub: Stub, reading: Get, hold: Hold, cause: tuple[str, str]
) -> None:
    drop, while_busy = DROPS[cause]
    before = model(reading(), "busy")
    holding = hold(0.6) if while_busy else None
    drop(stub)
    assert wait_until(lambda: drops(model(reading(), "busy")).get(cause, 0) > drops(before).get(cause, 0))
    if holding:
        holding.result()
    assert stub.ModelInfer(busy(1)).raw_output_contents  # by now the worker is idle
    now = model(reading(), "busy")
    # Nothing else was dropped, and nothing failed in another way.
    assert {key for key, count in drops(now).items() if count > drops(before).get(key, 0)} == {cause}
    assert now.failure_count - before.failure_count == sum(drops(now).values()) - sum(drops(before).values())
    reason, place = cause
    counted = value(telling, "fewheads_dropped_requests_total", model="busy", reason=reason, place=place)
    assert counted == drops(now)[cause]


async def test_an_unforeseen_failure_is_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_echo_bundle(tmp_path / "repository", "FP32")
    scheduler = Scheduler(5)
    repository = Repository(tmp_path / "repository", scheduler, target="onnxruntime", cache=tmp_path / "cache")
    control = ModelControl(repository, "none")
    try:
        await control.start()
        service = InferenceService(repository, scheduler)
        monkeypatch.setattr("edge.serving.inference.decode_inputs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await service.infer(echo(1), None)
        (entry,) = repository
        assert entry.statistics.snapshot().failures == {"ZeroDivisionError": 1}
    finally:
        await control.close()
        scheduler.close()


def test_the_most_that_waited(telling: Ready, stub: Stub, reading: Get, hold: Hold) -> None:
    holding = hold(0.6)
    calls = [stub.ModelInfer.future(busy(1)) for _ in range(3)]
    assert wait_until(lambda: reading().queue_depth_peak >= 3)
    for call in (holding, *calls):
        call.result()
    now = reading()
    assert (now.queue_depth, now.queue_bytes) == (0, 0)
    assert 3 <= now.queue_depth_peak <= 5
    assert 24 <= now.queue_bytes_peak <= QUEUE_BYTES
    assert value(telling, "fewheads_queue_depth_peak") == now.queue_depth_peak
    assert value(telling, "fewheads_queue_bytes_peak") == now.queue_bytes_peak


def test_latency_by_tier(telling: Ready, stub: Stub, reading: Get) -> None:
    def counts(server: Ready) -> dict[str, float]:
        name = "fewheads_tier_duration_seconds_count"
        return {labels["tier"]: count for labels, count in samples(server, name, stage="compute_infer")}

    for tier, times in (("full", 2), ("lean", 3)):
        for _ in range(times):
            stub.ModelInfer(text("good good", tier=tier))
    sentiment = model(reading(), "sentiment")
    of_tiers = {latency.tier: latency.stages for latency in sentiment.tier_latencies}
    assert {tier: stages[0].count for tier, stages in of_tiers.items()} == {"full": 2, "lean": 3} == counts(telling)
    for stages in of_tiers.values():
        assert [stage.stage for stage in stages] == list(STAGES)
        assert 0 < stages[0].p50_ns <= stages[0].p95_ns <= stages[0].p99_ns
    totals = {stage.stage: stage.total_ns for stage in sentiment.stages}
    summed = {name: sum(stages[index].total_ns for stages in of_tiers.values()) for index, name in enumerate(STAGES)}
    assert summed == totals


def test_a_model_of_one_tier_has_no_tiers(telling: Ready, stub: Stub, reading: Get) -> None:
    stub.ModelInfer(busy(1))
    assert model(reading(), "busy").success_count
    assert not model(reading(), "busy").tier_latencies
    assert not samples(telling, "fewheads_tier_duration_seconds_count", model="busy")


def test_answers_that_hold_nan_are_counted_and_left_as_they_are(telling: Ready, stub: Stub, reading: Get) -> None:
    for numbers, count in (([1, 2], 0), ([1, np.nan], 1), ([-np.inf], 2), ([3], 2)):
        request = echo(*numbers)
        assert stub.ModelInfer(request).raw_output_contents == request.raw_input_contents
        assert model(reading(), "echo-fp32").nonfinite_count == count
        assert value(telling, NONFINITE.name, model="echo-fp32") == count
        assert [m.value for m in model(reading(), "echo-fp32").metrics if m.name == NONFINITE.name] == [count]
    assert model(reading(), "busy").nonfinite_count == 0


def test_open_streams(stub: Stub, reading: Get) -> None:
    requests: Queue[pb.ModelInferRequest | None] = Queue()
    assert reading().streams == 0
    answers = stub.ModelStreamInfer(iter(requests.get, None))
    requests.put(echo(1))
    assert not next(answers).error_message
    assert reading().streams == 1
    requests.put(None)
    assert not list(answers)
    assert wait_until(lambda: reading().streams == 0)


def test_sensors_of_this_machine(telling: Ready, reading: Get) -> None:
    assert wait_until(lambda: any((s.kind, s.name) == ("utilization", "cpu") for s in reading().sensors))
    now = reading()
    (cpu,) = [sensor for sensor in now.sensors if (sensor.kind, sensor.name) == ("utilization", "cpu")]
    assert (0 <= cpu.value <= 1, cpu.unit, cpu.source) == (True, "ratio", "/proc/stat")
    assert 0 <= value(telling, "fewheads_utilization_ratio", unit="cpu") <= 1
    told = sum(len(samples(telling, name)) for name in FAMILIES)
    assert told == len(now.sensors)


def test_a_metric_that_is_only_in_the_table_is_told_everywhere() -> None:
    tokens = RequestMetric(
        "fewheads_input_tokens_total", "Tokens", lambda request: request.rows, "tokens", ("reason",), reason_of
    )
    runs = RequestMetric("fewheads_run_rows", "Rows", lambda request: request.batch_rows, "rows", buckets=(1, 4))
    waits = RequestMetric("fewheads_wait_seconds", "Waits", lambda r: r.timings.queue_ns, "seconds", buckets=(10**9,))
    table = (tokens, runs, waits)
    statistics = ModelStatistics(table)
    for rows, batch_rows, reason in ((3, 4, "load"), (2, 5, "full")):
        request = Request(rows=rows, batch_rows=batch_rows, tier_reason=reason)
        request.timings.queue_ns = 250_000_000
        statistics.succeeded(request)
    now = statistics.snapshot()
    told = {(m.name, *dict(m.labels).values()): (m.value, m.unit) for m in request_metrics(now, table)}
    assert told == {
        ("fewheads_input_tokens_total", "load"): (3, "tokens"),
        ("fewheads_input_tokens_total", "full"): (2, "tokens"),
        ("fewheads_run_rows_count",): (2, ""),
        ("fewheads_run_rows_sum",): (9, "rows"),
        ("fewheads_wait_seconds_count",): (2, ""),
        ("fewheads_wait_seconds_sum",): (0.5, "seconds"),
    }
    registry = CollectorRegistry()
    registry.register(Page([ModelNow("m", "1", now)], table))
    page = generate_latest(registry).decode()
    for line in (
        "# TYPE fewheads_input_tokens_total counter",
        'fewheads_input_tokens_total{model="m",reason="load",version="1"} 3.0',
        'fewheads_run_rows_bucket{le="4",model="m",version="1"} 1.0',
        'fewheads_run_rows_bucket{le="+Inf",model="m",version="1"} 2.0',
        'fewheads_run_rows_sum{model="m",version="1"} 9.0',
        'fewheads_wait_seconds_bucket{le="1",model="m",version="1"} 2.0',
        'fewheads_wait_seconds_sum{model="m",version="1"} 0.5',
    ):
        assert line in page.splitlines(), page


class Page(Collector):
    def __init__(self, models: list[ModelNow], table: tuple[RequestMetric, ...]) -> None:
        self.collect = lambda: families(models, table)  # type: ignore[method-assign]


def test_the_readme_lists_every_metric(telling: Ready) -> None:
    section = README.read_text().split("| metrics |")[1].split("\n\n")[0]
    listed = {name for row in section.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    known = {*(metric.name for metric in METRICS), *SERVER_METRICS, *BOARD_METRICS, "fewheads_build_info"}
    missing, unknown = sorted(known - listed), sorted(listed - known)
    assert not missing, f"add {missing} to the table of metrics in edge/README.md"
    assert not unknown, f"no metric is called {unknown}: correct the table of metrics in edge/README.md"
    with urllib.request.urlopen(f"http://127.0.0.1:{telling.metrics_port}/metrics", timeout=20) as page:
        shown = set(re.findall(r"^# TYPE (\w+)", page.read().decode(), re.MULTILINE))
    assert shown <= known
    assert {*(metric.name for metric in METRICS), *SERVER_METRICS} <= shown
