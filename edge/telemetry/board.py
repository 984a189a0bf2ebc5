"""The board's metrics for Prometheus, the GPU's under Triton's names, and the page that has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from edge import __version__
from edge.instruments.board import BoardInfo, read_board
from edge.instruments.energy import EnergyMeter
from edge.instruments.memory import MemoryReading, MemorySampler
from edge.instruments.sensors import SensorReading, Sensors
from edge.telemetry.pages import Content, Page

#: Kind and unit of a sensor to the name, the help and the label of its metric.
_SENSORS: Final = {
    ("temperature", "celsius"): ("fewheads_temperature_celsius", "Temperature of a thermal zone", "zone"),
    ("power", "watts"): ("fewheads_power_watts", "Power of a rail; VDD_IN is the whole board", "rail"),
    ("utilization", "ratio"): ("fewheads_utilization_ratio", "Load of a unit, 0 to 1", "unit"),
    ("frequency", "hertz"): ("fewheads_frequency_hertz", "Frequency of a clock", "clock"),
    ("frequency_limit", "hertz"): ("fewheads_frequency_limit_hertz", "Limit on the frequency of a clock", "clock"),
    ("fan", "ratio"): ("fewheads_fan_ratio", "Power of a fan, 0 to 1", "fan"),
    ("fan", "rpm"): ("fewheads_fan_speed_rpm", "Speed of a fan", "fan"),
    ("throttling", "level"): ("fewheads_throttling_level", "Active throttling, 0 is none", "cause"),
    ("throttling", "events"): ("fewheads_throttling_events_total", "Alarms of low voltage or high current", "cause"),
}
#: Triton's gauges of the GPU: name to help and the kind of sensor or memory.
_TRITON: Final = {
    "nv_gpu_utilization": ("GPU utilization, 0 to 1", "utilization"),
    "nv_gpu_power_usage": ("Watts of the rail of the GPU, which others may share", "power"),
    "nv_gpu_memory_used_bytes": ("Bytes of the GPU in the memory of the board", "device_used"),
    "nv_gpu_memory_total_bytes": ("Bytes of the memory that it shares", "device_total"),
}
#: Triton's gauges have this label, and an integrated GPU has no UUID in the kernel.
_GPU_UUID: Final = "integrated"
_MEMORY: Final = "fewheads_memory_bytes"
_IDLE: Final = "fewheads_idle_power_watts"
_BOARD: Final = "fewheads_board"
_ENERGY: Final = "fewheads_board_energy_joules_total"
#: The names of all metrics of the board.
BOARD_METRICS: Final = {_MEMORY, _IDLE, _ENERGY, f"{_BOARD}_info", *_TRITON, *(name for name, *_ in _SENSORS.values())}
_SIZES: Final = re.compile(rb"^(nv_gpu_memory_\w+\{[^}]*\}) (\S+)$", re.MULTILINE)


class BoardCollector(Collector):
    """Reads the board at each scrape."""

    def __init__(self, memory: MemorySampler, sensors: Sensors, energy: EnergyMeter | None) -> None:
        self._memory, self._sensors, self._energy = memory, sensors, energy

    def collect(self) -> Iterator[Family]:
        yield from board_metrics(self._memory.sample(), self._sensors.sample())
        known = (self._energy.idle_watts, self._energy.board_joules) if self._energy else (None, None)
        yield from power_metrics(read_board(), *known)
        yield InfoMetricFamily("fewheads_build", "The release", {"version": __version__})


def board_metrics(memory: Iterable[MemoryReading], sensors: Iterable[SensorReading]) -> Iterator[Family]:
    """Yield the families of memory and sensors; a family without readings is absent."""
    sizes = GaugeMetricFamily(_MEMORY, "Memory, by kind and source", labels=("kind", "source"))
    gpu: dict[str, float] = {}
    for size in memory:
        sizes.add_metric([size.kind, size.source], size.size_bytes)
        if size.kind.startswith("device_"):
            gpu[size.kind] = size.size_bytes
    yield sizes
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sensor in sensors:
        name, help, label = _SENSORS[sensor.kind, sensor.unit]
        if name not in families:
            new = CounterMetricFamily if sensor.unit == "events" else GaugeMetricFamily
            families[name] = new(name, help, labels=(label,))
        families[name].add_metric([sensor.name], sensor.value)
        if sensor.name == "gpu" or (sensor.kind == "power" and "GPU" in sensor.name):
            gpu.setdefault(sensor.kind, sensor.value)
    yield from families.values()
    for name, (help, kind) in _TRITON.items():
        if kind in gpu:
            family = GaugeMetricFamily(name, help, labels=("gpu_uuid",))
            family.add_metric([_GPU_UUID], gpu[kind])
            yield family


def power_metrics(board: BoardInfo | None, idle_watts: float | None, joules: float | None = None) -> Iterator[Family]:
    """Yield the board as labels, its energy, and its power while nothing runs, where they are known."""
    if board:
        facts = {name: getattr(board, name) for name in ("model", "soc", "l4t", "jetpack", "power_mode")}
        yield InfoMetricFamily(_BOARD, "The board and its software", {key: text for key, text in facts.items() if text})
    if joules is not None:
        yield CounterMetricFamily(_ENERGY, "Energy of the whole board since the start, an estimate", joules)
    if idle_watts is not None:
        yield GaugeMetricFamily(_IDLE, "Power of the board while nothing runs, an estimate", idle_watts)


def metrics_page(collector: Collector) -> Page:
    """Return the page for Prometheus, in the format that a header ``Accept`` names."""
    registry = CollectorRegistry()
    registry.register(collector)

    def page(accept: str) -> tuple[str, Callable[[], Content]]:
        # Never compressed: on a board, processor time costs more than bandwidth.
        encoder, content_type = choose_encoder(accept)

        def render() -> Content:
            # Triton's sizes become whole numbers, as Triton writes them: the library writes large numbers with an
            # exponent, and perf_analyzer reads no further than the point.
            text = _SIZES.sub(lambda size: b"%b %d" % (size[1], int(float(size[2]))), encoder(registry))
            return {"Content-Type": content_type}, text

        return content_type, render

    return page
