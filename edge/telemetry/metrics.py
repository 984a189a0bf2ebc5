"""The Prometheus page: metrics of the models, the server and its board, the GPU's under Triton's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from edge import __version__
from edge.connections.quota import Quota
from edge.instruments.board import BoardInfo, read_board
from edge.instruments.memory import MemoryReading
from edge.instruments.metrics import METRICS, PER_UNIT, Metric, ModelNow
from edge.instruments.sensors import SensorReading
from edge.instruments.snapshot import Histogram
from edge.repository.entry import Entry
from edge.telemetry.pages import Content, Page
from edge.telemetry.telemetry import Sources

#: The gauges of the server: name to help and value.
SERVER_METRICS: Final[dict[str, tuple[str, Callable[[Sources], float]]]] = {
    "fewheads_problems": ("Reasons why a part is unhealthy; the telemetry has the text", lambda of: len(of.problems())),
    "fewheads_queue_depth": ("Requests that wait for a worker", lambda of: len(of.scheduler.queue)),
    "fewheads_queue_bytes": ("Bytes of their tensors", lambda of: of.scheduler.queue.size_bytes),
    "fewheads_queue_depth_peak": ("Maximum queue depth since the start", lambda of: of.scheduler.queue.peak_jobs),
    "fewheads_queue_bytes_peak": ("Maximum of their bytes since the start", lambda of: of.scheduler.queue.peak_bytes),
    "fewheads_streams": ("Open streams of requests", lambda of: of.streams.open),
    "fewheads_stream_requests": ("Requests of streams in progress", lambda of: of.streams.in_flight),
}
#: The metrics of clients' connections: name to help.
CONNECTION_METRICS: Final = {
    "fewheads_connections": "Open connections of a port, including those that shake hands",
    "fewheads_held_bytes": "Bytes of requests and answers that clients make the server hold, on all ports together",
    "fewheads_refusals_total": "Clients of a port that were refused or disconnected, by reason",
}
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
#: The names of all metrics of the board.
BOARD_METRICS: Final = {_MEMORY, _IDLE, f"{_BOARD}_info", *_TRITON, *(name for name, *_ in _SENSORS.values())}
_SIZES: Final = re.compile(rb"^(nv_gpu_memory_\w+\{[^}]*\}) (\S+)$", re.MULTILINE)


class ServerCollector(Collector):
    """Reads the server's counters at each scrape, so that requests do no work for metrics."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        yield from families([self._model(entry) for entry in self._sources.repository if entry.version])
        for name, (text, read) in SERVER_METRICS.items():
            yield GaugeMetricFamily(name, text, read(self._sources))
        yield from _connection_metrics(self._sources.quota)
        yield from board_metrics(self._sources.memory.sample(), self._sources.sensors.sample())
        energy = self._sources.energy
        yield from power_metrics(read_board(), energy.idle_watts if energy else None)
        yield InfoMetricFamily("fewheads_build", "The release", {"version": __version__})

    def _model(self, entry: Entry) -> ModelNow:
        model = entry.model  # read once, because it may be unloaded at any moment
        return ModelNow(
            entry.name,
            entry.version,
            entry.statistics.snapshot(),
            self._sources.health.model_ready(entry),
            model.load_memory_bytes if model else None,
            model.program.cache_bytes if model else None,
            self._sources.energy_of(entry.name, entry.version),
        )


def families(models: Sequence[ModelNow], metrics: Sequence[Metric] = METRICS) -> Iterator[Family]:
    """Yield the family of each metric, with the samples of all models."""
    for metric in metrics:
        names = ("model", "version", *metric.labels)
        divisor = PER_UNIT.get(metric.unit, 1)
        # The name of a counter's family has no _total, that of its samples has.
        family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
        for model in models:
            for labels, value in metric.read(model):
                of = dict(zip(names, (model.name, model.version, *labels), strict=True))
                if isinstance(value, Histogram):
                    for bound, count in _buckets(value, divisor):
                        family.add_sample(f"{metric.name}_bucket", {**of, "le": bound}, count)
                    family.add_sample(f"{metric.name}_count", of, value.count)
                    family.add_sample(f"{metric.name}_sum", of, value.total / divisor)
                else:
                    family.add_sample(metric.name, of, value / divisor)
        yield family


def _connection_metrics(quota: Quota) -> Iterator[Family]:
    connections, held, refused = CONNECTION_METRICS.items()
    gauge = GaugeMetricFamily(*connections, labels=("port",))
    for port, count in quota.connections_of_ports().items():
        gauge.add_metric([port], count)
    yield gauge
    yield GaugeMetricFamily(*held, quota.held_bytes)
    counter = CounterMetricFamily(*refused, labels=("port", "reason"))
    for refusal, count in quota.refusals.copy().items():
        counter.add_metric(refusal, count)
    yield counter


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


def power_metrics(board: BoardInfo | None, idle_watts: float | None) -> Iterator[Family]:
    """Yield the board as labels, and its power while nothing runs, where they are known."""
    if board:
        facts = {name: getattr(board, name) for name in ("model", "soc", "l4t", "jetpack", "power_mode")}
        yield InfoMetricFamily(_BOARD, "The board and its software", {key: text for key, text in facts.items() if text})
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


def _buckets(histogram: Histogram, divisor: float) -> Iterable[tuple[str, int]]:
    """Return (upper bound, cumulative count) pairs, the last one for infinity."""
    bounds = [f"{bound / divisor:.9g}" for bound in histogram.bounds] + ["+Inf"]
    return zip(bounds, accumulate(histogram.counts), strict=True)
