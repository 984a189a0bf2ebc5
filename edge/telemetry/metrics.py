"""Prometheus metrics of models and the queue: Triton's names for what Triton has, ``fewheads_`` for the rest.

Those of the board are in :mod:`edge.telemetry.board_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from edge import __version__
from edge.instruments.statistics import BUCKETS_NS, Histogram, Snapshot
from edge.telemetry.board_metrics import board_metrics, whole_sizes
from edge.telemetry.sources import Sources

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_MODEL = ("model", "version")
_TIER_STAGES = ("request", "compute_infer")
#: Triton's counters per model, and where each is found.
_COUNTERS: dict[str, tuple[str, Callable[[Snapshot], float]]] = {
    "nv_inference_request_success": ("Answered requests", lambda now: now.success),
    "nv_inference_count": ("Inferences: rows of answered requests", lambda now: now.inference_count),
    "nv_inference_exec_count": ("Calls of the runtime", lambda now: now.execution_count),
    "nv_inference_request_duration_us": ("Total µs of answered requests", lambda now: _us(now, "request")),
    "nv_inference_queue_duration_us": ("Total µs of waiting", lambda now: _us(now, "queue")),
    "nv_inference_compute_input_duration_us": ("Total µs of preparing inputs", lambda now: _us(now, "compute_input")),
    "nv_inference_compute_infer_duration_us": ("Total µs of the runtime", lambda now: _us(now, "compute_infer")),
    "nv_inference_compute_output_duration_us": ("Total µs of making outputs", lambda now: _us(now, "compute_output")),
}


class ServerCollector(Collector):
    """Reads the server's own counters when Prometheus asks, so that a request pays for no metric.

    Args:
        sources: where everything is read.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        entries = [(entry, entry.statistics.snapshot()) for entry in self._sources.repository if entry.version]
        for name, (text, read) in _COUNTERS.items():
            # Untyped, because the library would add _total to a counter's name, and Triton's have none.
            metric = Metric(name, text, "unknown")
            for entry, now in entries:
                metric.add_sample(name, {"model": entry.name, "version": entry.version}, read(now))
            yield metric
        failures = Metric("nv_inference_request_failure", "Requests without an answer, by reason", "unknown")
        duration = HistogramMetricFamily(
            "fewheads_stage_duration_seconds", "Latency by stage", labels=(*_MODEL, "stage")
        )
        # A family of its own, of the stages that a tier decides: 47 lines each, and a model may have eight tiers.
        by_tier = HistogramMetricFamily(
            "fewheads_tier_duration_seconds", "Latency by tier", labels=(*_MODEL, "tier", "stage")
        )
        nonfinite = CounterMetricFamily(
            "fewheads_nonfinite_answers", "Answers that held a NaN or an infinity", labels=_MODEL
        )
        ready = GaugeMetricFamily("fewheads_model_ready", "1 when the model can be asked", labels=_MODEL)
        load = GaugeMetricFamily("fewheads_model_load_memory_bytes", "Growth of the process at load", labels=_MODEL)
        drops = CounterMetricFamily(
            "fewheads_dropped_requests",
            "Requests that were refused, by the bound, or given up, by where they were",
            labels=(*_MODEL, "reason", "place"),
        )
        tiers = CounterMetricFamily(
            "fewheads_tier_answers", "Answers by tier, and why it was that", labels=(*_MODEL, "tier", "reason")
        )
        runs = CounterMetricFamily("fewheads_batch_executions", "Calls of the runtime", labels=(*_MODEL, "rows"))
        for entry, now in entries:
            labels = [entry.name, entry.version]
            for (reason, place), count in now.drops.items():
                drops.add_metric([*labels, reason, place], count)
            for (tier, reason), count in now.tiers.items():
                tiers.add_metric([*labels, tier, reason], count)
            for rows, totals in now.batches.items():
                runs.add_metric([*labels, str(rows)], totals.count)
            for reason, count in now.failures.items():
                where = {"model": entry.name, "version": entry.version, "reason": reason}
                failures.add_sample(failures.name, where, count)
            for stage, histogram in now.stages.items():
                duration.add_metric([*labels, stage], _buckets(histogram), histogram.total_ns / 1e9)
            for tier, stages in now.tier_stages.items():
                for stage in _TIER_STAGES:
                    histogram = stages[stage]
                    by_tier.add_metric([*labels, tier, stage], _buckets(histogram), histogram.total_ns / 1e9)
            nonfinite.add_metric(labels, now.nonfinite)
            ready.add_metric(labels, float(self._sources.health.state(entry)[0] == "READY"))
            model = entry.model  # once: it may be unloaded at any moment
            if model:
                load.add_metric(labels, model.load_memory_bytes)
        problems = len(self._sources.problems())
        yield GaugeMetricFamily("fewheads_problems", "What is not healthy; telemetry tells it in words", problems)
        yield from (failures, drops, tiers, runs, duration, by_tier, nonfinite, ready, load)
        scheduler = self._sources.scheduler
        yield GaugeMetricFamily("fewheads_queue_depth", "Requests that wait for a worker", scheduler.depth)
        yield GaugeMetricFamily("fewheads_queue_bytes", "Bytes of their tensors", scheduler.queued_bytes)
        yield GaugeMetricFamily("fewheads_queue_depth_peak", "Most that waited since the start", scheduler.peak_depth)
        yield GaugeMetricFamily("fewheads_queue_bytes_peak", "Most of their bytes", scheduler.peak_queued_bytes)
        yield GaugeMetricFamily("fewheads_streams", "Open streams of requests", self._sources.streams.open)
        yield GaugeMetricFamily(
            "fewheads_stream_requests", "Requests of streams that are on their way", self._sources.streams.in_flight
        )
        yield from board_metrics(self._sources.memory.sample(), self._sources.sensors.sample())
        yield InfoMetricFamily("fewheads_build", "The release", {"version": __version__})


def metrics_app(collector: Collector) -> WSGIApplication:
    """Return the WSGI application that answers Prometheus."""
    registry = CollectorRegistry()
    registry.register(collector)
    # On a board, processor time is dearer than the network's.
    whole_page: WSGIApplication = make_wsgi_app(registry, disable_compression=True)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return [whole_sizes(part) for part in whole_page(environ, start_response)]

    return application


def _us(now: Snapshot, stage: str) -> float:
    return now.stages[stage].total_ns // 1000


def _buckets(histogram: Histogram) -> list[Any]:
    """Return (upper bound in seconds, cumulative count) pairs, the last one for infinity."""
    bounds = [f"{bound / 1e9:.9g}" for bound in BUCKETS_NS] + ["+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
