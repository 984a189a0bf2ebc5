"""Telemetry of a server over gRPC and on the Prometheus page: requests, tiers, streams, sensors, energy, the GPU."""

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge.errors import DeadlineExceeded, Overloaded
from edge.instruments.board import BoardInfo, read_board
from edge.instruments.energy import TierEnergy
from edge.instruments.memory import MemorySampler
from edge.instruments.metrics import METRICS, NONFINITE, ModelNow, RequestMetric
from edge.instruments.sensors import Sensors
from edge.instruments.snapshot import STAGES, Timings
from edge.instruments.statistics import ModelStatistics
from edge.launch import running_server
from edge.pb import telemetry_pb2
from edge.scheduling.job import expired
from edge.telemetry.board import _SENSORS, BOARD_METRICS, board_metrics, power_metrics
from edge.telemetry.metrics import CONNECTION_METRICS, SERVER_METRICS, families
from edge.telemetry.telemetry import request_metrics
from tests.support.boards import MODELS, orin_nano, write
from tests.support.in_process import running_service
from tests.support.metrics import CountedRequest, page_of, rendered, wait_until
from tests.support.sample_requests import good, raw_request, text
from tests.support.server_models import busy, write_busy_bundle, write_echo_bundle
from tests.support.text_model import write_sentiment_bundle

Get = Callable[[], telemetry_pb2.Reading]


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A server of its own, because these tests compare its counters."""
    directory = tmp_path_factory.mktemp("telemetry")
    write_sentiment_bundle(directory / "sentiment")
    write_busy_bundle(directory)
    write_echo_bundle(directory, "FP32")
    bundles = [directory / name for name in ("sentiment", "busy-1", "echo-fp32-1")]
    with running_server(bundles, cache=directory / "cache") as ready:
        yield ready


@pytest.fixture
def url(observed):
    return f"127.0.0.1:{observed.grpc_port}"


@pytest.fixture
def reading(telemetry):
    return lambda: telemetry.Get(telemetry_pb2.GetRequest())


def model(reading, name):
    (found,) = [model for model in reading.models if model.name == name]
    return found


def samples(server, name, **labels):
    families = text_string_to_metric_families(page_of(server))
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(sample.labels, sample.value) for sample in found if labels.items() <= sample.labels.items()]


def value(server, name, **labels):
    return samples(server, name, **labels)[0][1]


def echo(*numbers):
    return raw_request("echo-fp32", in_fp32=np.array(numbers, np.float32))


async def test_requests_that_fail_early_are_counted_by_reason_and_limit(tmp_path, monkeypatch):
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


def test_latency_by_tier(observed, stub, reading):
    def counts(server):
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


def test_nonfinite_outputs_are_counted_and_unchanged(observed, stub, reading):
    for numbers, count in (([1, 2], 0), ([1, np.nan], 1), ([-np.inf], 2)):
        request = echo(*numbers)
        assert stub.ModelInfer(request).raw_output_contents == request.raw_input_contents
        now = model(reading(), "echo-fp32")
        assert now.nonfinite_count == value(observed, NONFINITE.name, model="echo-fp32") == count
        assert [m.value for m in now.metrics if m.name == NONFINITE.name] == [count]


def test_sensors_of_this_machine(observed, reading):
    assert wait_until(lambda: any((s.kind, s.name) == ("utilization", "cpu") for s in reading().sensors))
    now = reading()
    (cpu,) = [sensor for sensor in now.sensors if (sensor.kind, sensor.name) == ("utilization", "cpu")]
    assert (0 <= cpu.value <= 1, cpu.unit, cpu.source) == (True, "ratio", "/proc/stat")
    assert 0 <= value(observed, "fewheads_utilization_ratio", unit="cpu") <= 1
    assert sum(len(samples(observed, name)) for name, *_ in _SENSORS.values()) == len(now.sensors)


README = Path(__file__).parent.parent.parent / "edge" / "README.md"


def board_page(root, accept="*/*"):
    return rendered(board_metrics(MemorySampler(root).sample(), Sensors(root).sample()), accept)


def gpu_metrics(page):
    """The metrics that perf_analyzer finds: lines with a name, a brace and the GPU's name in quotes."""
    found = re.findall(r'^(nv_gpu_\w+)\{gpu_uuid="([^"]+)"\} (\S+)$', page, re.MULTILINE)
    assert len({uuid for _, uuid, _ in found}) <= 1
    return {name: value for name, _, value in found}


def test_sensors_of_an_orin_nano(tmp_path):
    lines = board_page(orin_nano(tmp_path, 6)).splitlines()
    for line in (
        'fewheads_temperature_celsius{zone="tj-thermal"} 50.937',
        'fewheads_frequency_hertz{clock="cpu4"} 1.344e+09',
        'fewheads_throttling_level{cause="gpu-throttle-alert"} 1.0',
        'fewheads_throttling_events_total{cause="oc3"} 37.0',
        "# TYPE fewheads_throttling_events_total counter",
        "# TYPE fewheads_temperature_celsius gauge",
    ):
        assert line in lines
    assert sum(line.startswith("fewheads_temperature_celsius{") for line in lines) == 9


def test_board_and_idle_power(tmp_path):
    (facts, idle) = power_metrics(read_board(orin_nano(tmp_path, 7)), 5.25)
    lines = rendered([facts, idle]).splitlines()
    labels = f'jetpack="7.2.1",l4t="39.2.1",model="{MODELS[7]}",power_mode="25W",soc="tegra234"'
    assert f"fewheads_board_info{{{labels}}} 1.0" in lines
    assert "fewheads_idle_power_watts 5.25" in lines
    (unknown,) = power_metrics(BoardInfo("NVIDIA Jetson"), None)
    assert [sample.labels for sample in unknown.samples] == [{"model": "NVIDIA Jetson"}]
    assert not list(power_metrics(None, None))


def test_counters_and_energy_of_a_model():
    statistics = ModelStatistics()
    statistics.executed(4, 100)
    stages = {"compute_input_ns": 1000, "queue_ns": 2000, "compute_infer_ns": 3000, "compute_output_ns": 4000}
    for rows in (1, 3):
        statistics.succeeded(CountedRequest(Timings(**stages, request_ns=11000), rows, batch_rows=4))
    statistics.failed("Overloaded", 10, "bytes")
    for load_ns in (None, 1_500_000_000, 500_000_000):
        statistics.loaded(load_ns)
    statistics.evicted()
    energy = {"full": TierEnergy(12.5, 10, 10, 320), "half": TierEnergy(1.0, 4, 4, 4)}
    model = ModelNow("m", "1", statistics.snapshot(), ready=True, load_memory_bytes=7, energy=energy)
    found = [line for line in rendered(families([model])).splitlines() if re.match("nv_|fewheads_(dr|en|mod|ba)", line)]
    expected = "request_success{} 2.0, count{} 4.0, exec_count{} 1.0, request_duration_us{} 22.0, "
    expected += "queue_duration_us{} 4.0, compute_input_duration_us{} 2.0, compute_infer_duration_us{} 6.0, "
    expected += 'compute_output_duration_us{} 8.0, request_failure{reason="Overloaded"} 1.0, '
    expected += 'dropped_requests_total{place="bytes",reason="Overloaded"} 1.0, batch_executions_total{rows="4"} 1.0, '
    expected += 'model_ready{} 1.0, model_loads_total{outcome="failed"} 1.0, model_loads_total{outcome="ready"} 2.0, '
    expected += "model_load_seconds_total{} 2.0, model_evictions_total{} 1.0, "
    expected += 'model_load_memory_bytes{} 7.0, energy_joules_total{tier="full"} 12.5, '
    expected += 'energy_joules_total{tier="half"} 1.0, energy_requests_total{tier="full"} 10.0, '
    expected += 'energy_requests_total{tier="half"} 4.0, energy_tokens_total{tier="full"} 320.0'
    assert re.sub('nv_inference_|fewheads_|,?(model="m"|version="1"),?', "", ", ".join(found)) == expected


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
def test_gpu_metrics_have_tritons_names_and_whole_sizes(tmp_path, accept):
    """perf_analyzer would read 5.37280512e+08 as 5."""
    assert gpu_metrics(board_page(orin_nano(tmp_path, 6), accept)) == {
        "nv_gpu_utilization": "0.842",
        "nv_gpu_power_usage": "0.9722879999999999",
        "nv_gpu_memory_used_bytes": "537280512",
        "nv_gpu_memory_total_bytes": "7849639936",
    }


def test_unknown_gpu_metrics_are_absent(tmp_path):
    root = orin_nano(tmp_path / "board", 6)
    (root / "sys/class/devfreq/17000000.gpu/device/load").write_text("N/A\n")
    write(root, {"proc/meminfo": "MemTotal: 7665664 kB\n"})
    assert set(gpu_metrics(board_page(root))) == {"nv_gpu_power_usage"}
    desktop = write(tmp_path / "desktop", {"proc/meminfo": "MemTotal: 7665664 kB\nMemAvailable: 1 kB\n"})
    write(desktop / "sys/class/thermal/thermal_zone0", {"type": "acpitz\n", "temp": "27800\n"})
    shown = set(re.findall(r"^# TYPE (\w+)", board_page(desktop), re.MULTILINE))
    assert shown == {"fewheads_memory_bytes", "fewheads_temperature_celsius"}


def test_metric_of_the_table_is_in_telemetry_and_on_the_page():
    name = "fewheads_input_tokens_total"
    table = (
        RequestMetric(name, "Tokens", lambda r: r.rows, "tokens", ("reason",), lambda r: (r.tier_reason,)),
        RequestMetric("fewheads_wait_seconds", "Waits", lambda r: r.timings.queue_ns, "seconds", buckets=(10**9,)),
    )
    statistics = ModelStatistics(table)
    for rows, seconds, reason in ((3, 0.25, "load"), (2, 1.25, "full")):
        statistics.succeeded(CountedRequest(Timings(queue_ns=int(seconds * 1e9)), rows=rows, tier_reason=reason))
    now = statistics.snapshot()
    assert {(m.name, *dict(m.labels).values()): (m.value, m.unit) for m in request_metrics(now, table)} == {
        (name, "load"): (3, "tokens"),
        (name, "full"): (2, "tokens"),
        ("fewheads_wait_seconds_count",): (2, ""),
        ("fewheads_wait_seconds_sum",): (1.5, "seconds"),
    }
    page = rendered(families([ModelNow("m", "1", now)], table))
    for line in (
        f"# TYPE {name} counter",
        f'{name}{{model="m",reason="load",version="1"}} 3.0',
        'fewheads_wait_seconds_bucket{le="1",model="m",version="1"} 1.0',
        'fewheads_wait_seconds_bucket{le="+Inf",model="m",version="1"} 2.0',
        'fewheads_wait_seconds_sum{model="m",version="1"} 1.5',
    ):
        assert line in page.splitlines(), page


def test_the_readme_lists_every_metric(server):
    section = README.read_text().split("| metrics |")[1].split("\n\n")[0]
    listed = {name for row in section.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    always = {*(metric.name for metric in METRICS), *SERVER_METRICS, *CONNECTION_METRICS}
    known = always | {*BOARD_METRICS, "fewheads_build_info"}
    missing, unknown = sorted(known - listed), sorted(listed - known)
    assert not missing, f"add {missing} to the table of metrics in edge/README.md"
    assert not unknown, f"no metric is called {unknown}: correct the table of metrics in edge/README.md"
    shown = set(re.findall(r"^# TYPE (\w+)", page_of(server), re.MULTILINE))
    assert always <= shown <= known
