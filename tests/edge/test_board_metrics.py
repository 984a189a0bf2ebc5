"""Metrics of the board as Prometheus and perf_analyzer read them, from the files of an Orin Nano."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from edge.instruments.board import Board, read_board
from edge.instruments.energy import TierEnergy
from edge.instruments.memory import MemorySampler
from edge.instruments.metrics import ModelNow
from edge.instruments.sensors import Sensors
from edge.instruments.statistics import ModelStatistics
from edge.telemetry.metrics import board_metrics, families, metrics_page, power_metrics
from tests.support.boards import MODELS, orin_nano, write


class Page(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self.metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self.metrics


def of_root(root: Path, accept: str = "*/*") -> str:
    """Return the page of a board."""
    metrics = board_metrics(MemorySampler(root).sample(), Sensors(root).sample())
    return metrics_page(Page(*metrics))(accept)[1].decode()


def gpu_metrics(page: str) -> dict[str, float]:
    """What perf_analyzer finds: lines that begin with the name and a brace, the GPU's name in the first quotes."""
    found = re.findall(r'^(nv_gpu_\w+)\{gpu_uuid="([^"]+)"\} (\S+)$', page, re.MULTILINE)
    assert len({uuid for _, uuid, _ in found}) <= 1
    return {name: float(value) for name, _, value in found}


def test_sensors_of_an_orin_nano(tmp_path: Path) -> None:
    lines = of_root(orin_nano(tmp_path, 6)).splitlines()
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


def test_the_board_and_its_idle_power(tmp_path: Path) -> None:
    board = read_board(orin_nano(tmp_path, 7))
    (facts, idle) = power_metrics(board, 5.25)
    lines = generate_latest(registry_of(facts, idle)).decode().splitlines()
    labels = f'jetpack="7.2.1",l4t="39.2.1",model="{MODELS[7]}",power_mode="25W",soc="tegra234"'
    assert f"fewheads_board_info{{{labels}}} 1.0" in lines
    assert "fewheads_idle_power_watts 5.25" in lines
    (unknown,) = power_metrics(Board("NVIDIA Jetson"), None)
    assert [sample.labels for sample in unknown.samples] == [{"model": "NVIDIA Jetson"}]
    assert not list(power_metrics(None, None))


def test_energy_by_tier() -> None:
    now = ModelStatistics().snapshot()
    energy = {"full": TierEnergy(12.5, 10, 10, 320), "half": TierEnergy(1.0, 4, 4, 4)}
    found = list(families([ModelNow("m", "1", now, energy=energy), ModelNow("other", "1", now)]))
    page = generate_latest(registry_of(*found)).decode()
    assert [line for line in page.splitlines() if line.startswith("fewheads_energy_")] == [
        'fewheads_energy_joules_total{model="m",tier="full",version="1"} 12.5',
        'fewheads_energy_joules_total{model="m",tier="half",version="1"} 1.0',
        'fewheads_energy_requests_total{model="m",tier="full",version="1"} 10.0',
        'fewheads_energy_requests_total{model="m",tier="half",version="1"} 4.0',
        'fewheads_energy_tokens_total{model="m",tier="full",version="1"} 320.0',
    ]


def registry_of(*metrics: Metric) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Page(*metrics))
    return registry


@pytest.mark.parametrize("jetpack", [5, 6, 7])
def test_the_gpu_under_tritons_names(tmp_path: Path, jetpack: int) -> None:
    assert gpu_metrics(of_root(orin_nano(tmp_path, jetpack))) == {
        "nv_gpu_utilization": 0.842,
        "nv_gpu_power_usage": pytest.approx(5.064 * 0.192),
        "nv_gpu_memory_used_bytes": 524688 * 1024,
        "nv_gpu_memory_total_bytes": 7665664 * 1024,
    }


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
def test_sizes_have_all_their_digits(tmp_path: Path, accept: str) -> None:
    """As perf_analyzer needs them, which would read 5.37280512e+08 as 5."""
    lines = of_root(orin_nano(tmp_path, 6), accept).splitlines()
    assert 'nv_gpu_memory_used_bytes{gpu_uuid="integrated"} 537280512' in lines
    assert 'nv_gpu_memory_total_bytes{gpu_uuid="integrated"} 7849639936' in lines


def test_what_is_unknown_is_absent(tmp_path: Path) -> None:
    root = orin_nano(tmp_path, 6)
    (root / "sys/class/devfreq/17000000.gpu/device/load").write_text("N/A\n")
    write(root, {"proc/meminfo": "MemTotal: 7665664 kB\n"})
    assert set(gpu_metrics(of_root(root))) == {"nv_gpu_power_usage"}


def test_a_machine_without_a_gpu_names_none(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 7665664 kB\nMemAvailable: 1 kB\n",
        "sys/class/thermal/thermal_zone0/type": "acpitz\n",
        "sys/class/thermal/thermal_zone0/temp": "27800\n",
    }
    text = of_root(write(tmp_path, files))
    assert gpu_metrics(text) == {}
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert families == {"fewheads_memory_bytes", "fewheads_temperature_celsius"}


def test_names_are_escaped(tmp_path: Path) -> None:
    write(tmp_path / "sys/class/thermal/thermal_zone0", {"type": 'a"} 1\\', "temp": "1000"})
    assert 'fewheads_temperature_celsius{zone="a\\"} 1\\\\"} 1.0' in of_root(tmp_path).splitlines()
