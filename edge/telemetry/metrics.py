"""The Prometheus page: the metrics of :mod:`edge.instruments.metrics`, and those of the server and its queue.

Those of the board are in :mod:`edge.telemetry.board_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from edge import __version__
from edge.instruments.board import read_board
from edge.instruments.histogram import Histogram
from edge.instruments.metrics import METRICS, PER_UNIT, Metric, ModelNow
from edge.repository.entry import Entry
from edge.telemetry.board_metrics import board_metrics, power_metrics, whole_sizes
from edge.telemetry.sources import Sources

#: The gauges of the server, and where each is found.
SERVER_METRICS: Final[dict[str, tuple[str, Callable[[Sources], float]]]] = {
    "fewheads_problems": ("Reasons why a part is not healthy; telemetry has the text", lambda of: len(of.problems())),
    "fewheads_queue_depth": ("Requests that wait for a worker", lambda of: of.scheduler.depth),
    "fewheads_queue_bytes": ("Bytes of their tensors", lambda of: of.scheduler.queued_bytes),
    "fewheads_queue_depth_peak": ("Most that waited since the start", lambda of: of.scheduler.peak_depth),
    "fewheads_queue_bytes_peak": ("Most of their bytes", lambda of: of.scheduler.peak_queued_bytes),
    "fewheads_streams": ("Open streams of requests", lambda of: of.streams.open),
    "fewheads_stream_requests": ("Requests of streams in progress", lambda of: of.streams.in_flight),
}


class ServerCollector(Collector):
    """Reads the server's own counters when Prometheus asks, so that a request pays for no metric.

    Args:
        sources: where everything is read.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        """Yield every metric."""
        yield from families([self._model(entry) for entry in self._sources.repository if entry.version])
        for name, (text, read) in SERVER_METRICS.items():
            yield GaugeMetricFamily(name, text, read(self._sources))
        yield from board_metrics(self._sources.memory.sample(), self._sources.sensors.sample())
        energy = self._sources.energy
        yield from power_metrics(read_board(), energy.idle_watts if energy else None)
        yield InfoMetricFamily("fewheads_build", "The release", {"version": __version__})

    def _model(self, entry: Entry) -> ModelNow:
        model = entry.model  # once: it may be unloaded at any moment
        return ModelNow(
            entry.name,
            entry.version,
            entry.statistics.snapshot(),
            self._sources.health.state(entry)[0] == "READY",
            model.load_memory_bytes if model else None,
            self._sources.energy_of(entry.name, entry.version),
        )


def families(models: Sequence[ModelNow], metrics: Sequence[Metric] = METRICS) -> Iterator[Family]:
    """Yield a family for each metric of a table, with the samples of all models."""
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


def metrics_page(collector: Collector) -> Callable[[str], tuple[Mapping[str, str], bytes]]:
    """Return the function that renders the page for Prometheus, in the format that a header ``Accept`` names.

    It is never compressed: on a board, processor time costs more than bandwidth.
    """
    registry = CollectorRegistry()
    registry.register(collector)

    def page(accept: str) -> tuple[Mapping[str, str], bytes]:
        encoder, content_type = choose_encoder(accept)
        return {"Content-Type": content_type}, whole_sizes(encoder(registry))

    return page


def _buckets(histogram: Histogram, divisor: float) -> Iterable[tuple[str, int]]:
    """Return (upper bound, cumulative count) pairs, the last one for infinity."""
    bounds = [f"{bound / divisor:.9g}" for bound in histogram.bounds] + ["+Inf"]
    return zip(bounds, accumulate(histogram.counts), strict=True)
