"""The metrics of a server for Prometheus: of its models, its requests and connections, and its board."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from edge.connections.quota import Quota
from edge.instruments.metrics import METRICS, PER_UNIT, Metric, ModelNow
from edge.instruments.snapshot import Histogram
from edge.repository.entry import Entry
from edge.telemetry.board import BoardCollector
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


class ServerCollector(Collector):
    """Reads the server's counters at each scrape, so that requests do no work for metrics."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._board = BoardCollector(sources.memory, sources.sensors, sources.energy)

    def collect(self) -> Iterator[Family]:
        yield from families([self._model(entry) for entry in self._sources.repository if entry.version])
        for name, (text, read) in SERVER_METRICS.items():
            yield GaugeMetricFamily(name, text, read(self._sources))
        yield from _connection_metrics(self._sources.quota)
        yield from self._board.collect()

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


def _buckets(histogram: Histogram, divisor: float) -> Iterable[tuple[str, int]]:
    """Return (upper bound, cumulative count) pairs, the last one for infinity."""
    bounds = [f"{bound / divisor:.9g}" for bound in histogram.bounds] + ["+Inf"]
    return zip(bounds, accumulate(histogram.counts), strict=True)
