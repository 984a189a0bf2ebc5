"""The Prometheus page: metrics of models and of the board, as Prometheus and perf_analyzer read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge.instruments.board import Board, read_board
from edge.instruments.energy import TierEnergy
from edge.instruments.memory import MemorySampler
from edge.instruments.metrics import METRICS, ModelNow, RequestMetric
from edge.instruments.sensors import Sensors
from edge.instruments.snapshot import Timings
from edge.instruments.statistics import ModelStatistics
from edge.server import Ready
from edge.telemetry.metrics import BOARD_METRICS, SERVER_METRICS, board_metrics, families, power_metrics
from edge.telemetry.telemetry import request_metrics
from tests.support.boards import MODELS, orin_nano, write
from tests.support.metrics import CountedRequest, page_of, rendered

README = Path(__file__).parent.parent.parent / "edge" / "README.md"


def board_page(root: Path, accept: str = "*/*") -> str:
    return rendered(board_metrics(MemorySampler(root).sample(), Sensors(root).sample()), accept)


def gpu_metrics(page: str) -> dict[str, str]:
    """The metrics that perf_analyzer finds: lines with a name, a brace and the GPU's name in quotes."""
    found = re.findall(r'^(nv_gpu_\w+)\{gpu_uuid="([^"]+)"\} (\S+)$', page, re.MULTILINE)
    assert len({uuid for _, uuid, _ in found}) <= 1
    return {name: value for name, _, value in found}


def test_sensors_of_an_orin_nano(tmp_path: Path) -> None:
    lines = board_page(orin_nano(tmp_path, 6)).splitlines()
    for line in (
        'fewheads_temperature_celsius{zone="tj-thermal"} 50.937',
        'fewheads_power_watts{rail="VDD_IN"} 6.654464',
        'fewheads_utilization_ratio{unit="gpu"} 0.842',
        'fewheads_frequency_hertz{clock="cpu4"} 1.344e+09',
        'fewheads_frequency_limit_hertz{clock="gpu-max"} 1.02e+09',
        'fewheads_fan_speed_rpm{fan="pwm_tach"} 1843.0',
        'fewheads_throttling_level{cause="gpu-throttle-alert"} 1.0',
        'fewheads_throttling_events_total{cause="oc3"} 37.0',
        "# TYPE fewheads_throttling_events_total counter",
        "# TYPE fewheads_temperature_celsius gauge",
    ):
        assert line in lines
    assert sum(line.startswith("fewheads_temperature_celsius{") for line in lines) == 9


def test_board_and_idle_power(tmp_path: Path) -> None:
    board = read_board(orin_nano(tmp_path, 7))
    (facts, idle) = power_metrics(board, 5.25)
    lines = rendered([facts, idle]).splitlines()
    labels = f'jetpack="7.2.1",l4t="39.2.1",model="{MODELS[7]}",power_mode="25W",soc="tegra234"'
    assert f"fewheads_board_info{{{labels}}} 1.0" in lines
    assert "fewheads_idle_power_watts 5.25" in lines
    (unknown,) = power_metrics(Board("NVIDIA Jetson"), None)
    assert [sample.labels for sample in unknown.samples] == [{"model": "NVIDIA Jetson"}]
    assert not list(power_metrics(None, None))


def test_energy_by_tier() -> None:
    now = ModelStatistics().snapshot()
    energy = {"full": TierEnergy(12.5, 10, 10, 320), "half": TierEnergy(1.0, 4, 4, 4)}
    page = rendered(families([ModelNow("m", "1", now, energy=energy), ModelNow("other", "1", now)]))
    assert [line for line in page.splitlines() if line.startswith("fewheads_energy_")] == [
        'fewheads_energy_joules_total{model="m",tier="full",version="1"} 12.5',
        'fewheads_energy_joules_total{model="m",tier="half",version="1"} 1.0',
        'fewheads_energy_requests_total{model="m",tier="full",version="1"} 10.0',
        'fewheads_energy_requests_total{model="m",tier="half",version="1"} 4.0',
        'fewheads_energy_tokens_total{model="m",tier="full",version="1"} 320.0',
    ]


@pytest.mark.parametrize("jetpack", [5, 6, 7])
@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
def test_gpu_metrics_have_tritons_names_and_whole_sizes(tmp_path: Path, jetpack: int, accept: str) -> None:
    """perf_analyzer would read 5.37280512e+08 as 5."""
    assert gpu_metrics(board_page(orin_nano(tmp_path, jetpack), accept)) == {
        "nv_gpu_utilization": "0.842",
        "nv_gpu_power_usage": "0.9722879999999999",
        "nv_gpu_memory_used_bytes": "537280512",
        "nv_gpu_memory_total_bytes": "7849639936",
    }


def test_unknown_gpu_metrics_are_absent(tmp_path: Path) -> None:
    root = orin_nano(tmp_path / "board", 6)
    (root / "sys/class/devfreq/17000000.gpu/device/load").write_text("N/A\n")
    write(root, {"proc/meminfo": "MemTotal: 7665664 kB\n"})
    assert set(gpu_metrics(board_page(root))) == {"nv_gpu_power_usage"}
    desktop = write(tmp_path / "desktop", {"proc/meminfo": "MemTotal: 7665664 kB\nMemAvailable: 1 kB\n"})
    write(desktop / "sys/class/thermal/thermal_zone0", {"type": "acpitz\n", "temp": "27800\n"})
    shown = set(re.findall(r"^# TYPE (\w+)", board_page(desktop), re.MULTILINE))
    assert shown == {"fewheads_memory_bytes", "fewheads_temperature_celsius"}


def test_label_values_are_escaped(tmp_path: Path) -> None:
    write(tmp_path / "sys/class/thermal/thermal_zone0", {"type": 'a"} 1\\', "temp": "1000"})
    assert 'fewheads_temperature_celsius{zone="a\\"} 1\\\\"} 1.0' in board_page(tmp_path).splitlines()


def test_metric_of_the_table_is_in_telemetry_and_on_the_page() -> None:
    table = (
        RequestMetric(
            "fewheads_input_tokens_total", "Tokens", lambda r: r.rows, "tokens", ("reason",), lambda r: (r.tier_reason,)
        ),
        RequestMetric("fewheads_run_rows", "Rows", lambda r: r.batch_rows, "rows", buckets=(1, 4)),
        RequestMetric("fewheads_wait_seconds", "Waits", lambda r: r.timings.queue_ns, "seconds", buckets=(10**9,)),
    )
    statistics = ModelStatistics(table)
    for rows, batch_rows, reason in ((3, 4, "load"), (2, 5, "full")):
        timings = Timings(queue_ns=250_000_000)
        statistics.succeeded(CountedRequest(timings, rows=rows, batch_rows=batch_rows, tier_reason=reason))
    now = statistics.snapshot()
    samples = {(m.name, *dict(m.labels).values()): (m.value, m.unit) for m in request_metrics(now, table)}
    assert samples == {
        ("fewheads_input_tokens_total", "load"): (3, "tokens"),
        ("fewheads_input_tokens_total", "full"): (2, "tokens"),
        ("fewheads_run_rows_count",): (2, ""),
        ("fewheads_run_rows_sum",): (9, "rows"),
        ("fewheads_wait_seconds_count",): (2, ""),
        ("fewheads_wait_seconds_sum",): (0.5, "seconds"),
    }
    page = rendered(families([ModelNow("m", "1", now)], table))
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


def test_the_readme_lists_every_metric(server: Ready) -> None:
    section = README.read_text().split("| metrics |")[1].split("\n\n")[0]
    listed = {name for row in section.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    known = {*(metric.name for metric in METRICS), *SERVER_METRICS, *BOARD_METRICS, "fewheads_build_info"}
    missing, unknown = sorted(known - listed), sorted(listed - known)
    assert not missing, f"add {missing} to the table of metrics in edge/README.md"
    assert not unknown, f"no metric is called {unknown}: correct the table of metrics in edge/README.md"
    shown = set(re.findall(r"^# TYPE (\w+)", page_of(server), re.MULTILINE))
    assert shown <= known
    assert {*(metric.name for metric in METRICS), *SERVER_METRICS} <= shown
