"""Prometheus metrics: Triton's names for what Triton has, ``fewheads_`` for the rest. Only this file names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from edge import __version__
from edge.errors import Literally, UsageError
from edge.memory import MemorySampler
from edge.repository import Repository
from edge.scheduler import Scheduler
from edge.statistics import BUCKETS_NS, Histogram, Snapshot
from edge.streams import Streams

_MODEL = ("model", "version")
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
        repository: the models and their counters.
        scheduler: the queue.
        memory: where memory is read.
        streams: the streams that are open.
    """

    def __init__(self, repository: Repository, scheduler: Scheduler, memory: MemorySampler, streams: Streams) -> None:
        self._repository = repository
        self._scheduler = scheduler
        self._memory = memory
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        entries = [(entry, entry.statistics.snapshot()) for entry in self._repository if entry.version]
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
            ready.add_metric(labels, float(entry.state == "READY"))
            model = entry.model  # once: it may be unloaded at any moment
            if model:
                load.add_metric(labels, model.load_memory_bytes)
        yield from (failures, drops, tiers, runs, duration, ready, load)
        yield GaugeMetricFamily("fewheads_queue_depth", "Requests that wait for a worker", self._scheduler.depth)
        yield GaugeMetricFamily("fewheads_queue_bytes", "Bytes of their tensors", self._scheduler.queued_bytes)
        yield GaugeMetricFamily("fewheads_streams", "Open streams of requests", self._streams.open)
        yield GaugeMetricFamily(
            "fewheads_stream_requests", "Requests of streams that are on their way", self._streams.in_flight
        )
        memory = GaugeMetricFamily("fewheads_memory_bytes", "Memory, by kind and source", labels=("kind", "source"))
        for sample in self._memory.sample():
            memory.add_metric([sample.kind, sample.source], sample.size_bytes)
        yield memory
        yield InfoMetricFamily("fewheads_build", "The release", {"version": __version__})


class MetricsServer:
    """Serves ``/metrics`` over HTTP.

    Attributes:
        port: where it listens.

    Raises:
        UsageError: the port cannot be taken.
    """

    def __init__(self, collector: ServerCollector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            fix = "Give another --metrics-port, or 0 for any free one."
            raise UsageError(
                f"--metrics-port {port}", given=Literally(error), expected="a free port", fix=fix
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _us(now: Snapshot, stage: str) -> float:
    return now.stages[stage].total_ns // 1000


def _buckets(histogram: Histogram) -> list[Any]:
    """Return (upper bound in seconds, cumulative count) pairs, the last one for infinity."""
    bounds = [f"{bound / 1e9:.9g}" for bound in BUCKETS_NS] + ["+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
