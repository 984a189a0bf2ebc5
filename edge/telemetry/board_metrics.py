"""Prometheus metrics of the board: memory, sensors, and the GPU under Triton's names, where it can be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from edge.instruments.board import Board
from edge.instruments.memory import MemoryReading
from edge.instruments.sensors import SensorReading

#: Kind and unit of a sensor to the name, the text and the label of its metric. A counter's name gets ``_total``.
_SENSORS = {
    ("temperature", "celsius"): ("fewheads_temperature_celsius", "Temperature of a thermal zone", "zone"),
    ("power", "watts"): ("fewheads_power_watts", "Power of a rail; VDD_IN is the whole board", "rail"),
    ("utilization", "ratio"): ("fewheads_utilization_ratio", "How busy a unit is, 0 to 1", "unit"),
    ("frequency", "hertz"): ("fewheads_frequency_hertz", "Frequency of a clock", "clock"),
    ("frequency_limit", "hertz"): ("fewheads_frequency_limit_hertz", "Bound of the frequency of a clock", "clock"),
    ("fan", "ratio"): ("fewheads_fan_ratio", "Power of a fan, 0 to 1", "fan"),
    ("fan", "rpm"): ("fewheads_fan_speed_rpm", "Speed of a fan", "fan"),
    ("throttling", "level"): ("fewheads_throttling_level", "Throttling that is on, 0 is none", "cause"),
    ("throttling", "events"): (
        "fewheads_throttling_events",
        "Alarms of too low a voltage or too much current",
        "cause",
    ),
}
#: An integrated GPU has no UUID in the kernel, and Triton's metrics must have this label.
_INTEGRATED = "integrated"
#: Triton's gauges, and the kind of sensor or memory that each is.
_TRITON = {
    "nv_gpu_utilization": ("GPU utilization, 0 to 1", "utilization"),
    "nv_gpu_power_usage": ("Watts of the rail of the GPU, which others may share", "power"),
    "nv_gpu_memory_used_bytes": ("Bytes of the GPU in the memory of the board", "device_used"),
    "nv_gpu_memory_total_bytes": ("Bytes of the memory that it shares", "device_total"),
}
_MEMORY = "fewheads_memory_bytes"
_IDLE = "fewheads_idle_power_watts"
_BOARD = "fewheads_board"
#: The names of all metrics of the board, as on the page.
BOARD_METRICS = frozenset(
    (
        _MEMORY,
        _IDLE,
        f"{_BOARD}_info",
        *_TRITON,
        *(f"{name}_total" if unit == "events" else name for (_, unit), (name, *_) in _SENSORS.items()),
    )
)
_SIZES = re.compile(rb"^(nv_gpu_memory_\w+\{[^}]*\}) (\S+)$", re.MULTILINE)


def board_metrics(memory: Iterable[MemoryReading], sensors: Iterable[SensorReading]) -> Iterator[Metric]:
    """Yield the metrics of readings. A family of which there is none stays away.

    Args:
        memory: of the process, the system and the device.
        sensors: of the board.
    """
    sizes = GaugeMetricFamily(_MEMORY, "Memory, by kind and source", labels=("kind", "source"))
    gpu: dict[str, float] = {}
    for size in memory:
        sizes.add_metric([size.kind, size.source], size.size_bytes)
        if size.kind.startswith("device_"):
            gpu[size.kind] = size.size_bytes
    yield sizes
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sensor in sensors:
        name, text, label = _SENSORS[sensor.kind, sensor.unit]
        if name not in families:
            new = CounterMetricFamily if sensor.unit == "events" else GaugeMetricFamily
            families[name] = new(name, text, labels=(label,))
        families[name].add_metric([sensor.name], sensor.value)
        if sensor.name == "gpu" or (sensor.kind == "power" and "GPU" in sensor.name):
            gpu.setdefault(sensor.kind, sensor.value)
    yield from families.values()
    for name, (text, kind) in _TRITON.items():
        if kind in gpu:
            family = GaugeMetricFamily(name, text, labels=("gpu_uuid",))
            family.add_metric([_INTEGRATED], gpu[kind])
            yield family


def power_metrics(board: Board | None, idle_watts: float | None) -> Iterator[Metric]:
    """Yield the board as labels, and its power while nothing runs; each only where it is known."""
    if board:
        facts = {
            "model": board.model,
            "soc": board.soc,
            "l4t": board.l4t,
            "jetpack": board.jetpack,
            "power_mode": board.power_mode,
        }
        yield InfoMetricFamily(_BOARD, "The board and its software", {key: text for key, text in facts.items() if text})
    if idle_watts is not None:
        yield GaugeMetricFamily(_IDLE, "Power of the board while nothing runs, an estimate", idle_watts)


def whole_sizes(page: bytes) -> bytes:
    """Return a page of metrics with Triton's sizes as whole numbers, as Triton writes them.

    The library writes large numbers with an exponent, and perf_analyzer reads no further than the point before it.
    """
    return _SIZES.sub(lambda found: b"%b %d" % (found[1], int(float(found[2]))), page)
