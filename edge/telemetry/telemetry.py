"""Readings of the whole server: memory, sensors, and latency by model, tier and stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from edge.connections.quota import Quota
from edge.health.health import Health
from edge.instruments.board import read_board
from edge.instruments.energy import EnergyMeter, ModelTier, TierEnergy
from edge.instruments.memory import MemorySampler
from edge.instruments.metrics import NONFINITE, PER_UNIT, REQUEST_METRICS, RequestMetric
from edge.instruments.sampling import watch_board
from edge.instruments.sensors import Sensors
from edge.instruments.snapshot import Histogram, Snapshot, Stages, TierRuns
from edge.pb import telemetry_pb2 as pb
from edge.repository.entry import Entry
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.security.watched import Watched
from edge.serving.streams import Streams


class ServedWork(NamedTuple):
    """The runs of a server, as :class:`edge.instruments.energy.Activity`."""

    repository: Repository
    scheduler: Scheduler

    def running(self) -> bool:
        return any(run is not None for run in self.scheduler.runs.now)

    def run_count(self) -> int:
        return sum(entry.statistics.execution_count for entry in self.repository)

    def loading(self) -> bool:
        return any(entry.state == "LOADING" for entry in self.repository)

    def runs(self) -> dict[ModelTier, TierRuns]:
        return {
            ModelTier(entry.name, entry.version, tier): runs
            for entry in self.repository
            for tier, runs in entry.statistics.runs().items()
        }


class Sources(NamedTuple):
    """The parts of a server that have data to report."""

    scheduler: Scheduler
    repository: Repository
    health: Health
    memory: MemorySampler
    sensors: Sensors
    streams: Streams
    quota: Quota
    files: Sequence[Watched[Any]] = ()
    energy: EnergyMeter | None = None  # None on a machine that does not measure its power

    def energy_of(self, name: str, version: str) -> dict[str, TierEnergy]:
        """Return the energy of each tier of a model, where it is known."""
        energy = self.energy.energy() if self.energy else {}
        return {key.tier: of for key, of in energy.items() if (key.model, key.version) == (name, version)}

    def problems(self) -> list[str]:
        """Return the reasons why the server or a part of it is unhealthy, one sentence each."""
        return [*self.health.problems(), *(file.problem for file in self.files if file.problem)]


#: The state of a model that is not loaded, and answers requests nevertheless: the next one loads it.
ON_DEMAND = "ON_DEMAND"


class Telemetry:
    """Composes readings for the Telemetry service, from the same counters as Prometheus' page."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._started = time.monotonic()

    async def watch(self) -> None:
        """Measure energy, and sample load and peak memory for all readers every second, until cancelled."""
        await watch_board(self._sources.memory, self._sources.sensors, self._sources.energy)

    def reading(self) -> pb.Reading:
        """Return a new reading. It takes milliseconds, for PSS and power: too long for the event loop."""
        reading = pb.Reading(
            time_ms=time.time_ns() // 1_000_000,
            uptime_seconds=time.monotonic() - self._started,
            queue_depth=len(self._sources.scheduler.queue),
            queue_bytes=self._sources.scheduler.queue.size_bytes,
            queue_depth_peak=self._sources.scheduler.queue.peak_jobs,
            queue_bytes_peak=self._sources.scheduler.queue.peak_bytes,
            streams=self._sources.streams.open,
            models=[
                _model(entry, self._state(entry), self._sources.energy_of(entry.name, entry.version))
                for entry in self._sources.repository
            ],
            problems=self._sources.problems(),
        )
        board = read_board()
        if board:
            fields = ("model", "soc", "l4t", "jetpack", "power_mode", "super_firmware", "kernel")
            reading.board.CopyFrom(pb.Board(**{name: getattr(board, name) for name in fields}))
        energy = self._sources.energy
        if energy and energy.idle_watts is not None:
            reading.idle_power_watts = energy.idle_watts
        for size in self._sources.memory.sample():
            reading.memory.add(**msgspec.structs.asdict(size))
        for sensor in self._sources.sensors.sample():
            reading.sensors.add(**msgspec.structs.asdict(sensor))
        return reading

    def _state(self, entry: Entry) -> str:
        state = self._sources.health.state(entry)[0]
        return ON_DEMAND if state == "UNAVAILABLE" and entry.state != "READY" and entry.answers else state


def _model(entry: Entry, state: str, energy: Mapping[str, TierEnergy]) -> pb.ModelReading:
    now = entry.statistics.snapshot()
    metrics = list(request_metrics(now))
    message = pb.ModelReading(
        name=entry.name,
        version=entry.version,
        state=state,
        success_count=now.success,
        failure_count=now.fail,
        nonfinite_count=int(sum(metric.value for metric in metrics if metric.name == NONFINITE.name)),
        metrics=metrics,
        stages=_stages(now.stages),
        tier_latencies=[pb.TierLatency(tier=tier, stages=_stages(of)) for tier, of in now.tier_stages.items()],
        executions={rows: totals.count for rows, totals in now.batches.items()},
    )
    for (reason, place), count in now.drops.items():
        message.drops.add(reason=reason, place=place, count=count)
    for (tier, reason), count in now.tiers.items():
        message.tiers.add(tier=tier, reason=reason, count=count)
    for tier, of in energy.items():
        tokens = of.tokens if of.tokens != of.rows else None
        message.energy.add(tier=tier, joules=of.joules, requests=of.requests, tokens=tokens)
    model = entry.model  # read once, because it may be unloaded at any moment
    if model:
        message.platform = model.runner.platform
        message.device = model.runner.device
        message.load_memory_bytes = model.load_memory_bytes
    return message


def request_metrics(now: Snapshot, metrics: Sequence[RequestMetric] = REQUEST_METRICS) -> Iterator[pb.Metric]:
    """Yield the samples of the metrics of requests."""
    for metric in metrics:
        divisor = PER_UNIT.get(metric.unit, 1)
        for values, value in now.counted[metric.name].items():
            labels = dict(zip(metric.labels, values, strict=True))
            if isinstance(value, Histogram):
                yield pb.Metric(name=f"{metric.name}_count", labels=labels, value=value.count)
                yield pb.Metric(name=f"{metric.name}_sum", labels=labels, value=value.total / divisor, unit=metric.unit)
            else:
                yield pb.Metric(name=metric.name, labels=labels, value=value / divisor, unit=metric.unit)


def _stages(stages: Stages) -> list[pb.StageReading]:
    return [
        pb.StageReading(
            stage=stage,
            count=durations.count,
            total_ns=durations.total,
            p50_ns=durations.percentile(50),
            p95_ns=durations.percentile(95),
            p99_ns=durations.percentile(99),
            bucket_counts=durations.counts,
        )
        for stage, durations in stages.items()
    ]
