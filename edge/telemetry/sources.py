"""Data sources of the exporters of telemetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from edge.connections.quota import Quota
from edge.health.health import Health
from edge.instruments.energy import EnergyMeter, ModelTier, TierEnergy
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.instruments.snapshot import TierRuns
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.security.watched import Watched
from edge.serving.streams import Streams


class ServedWork(NamedTuple):
    """The runs of a server, as :class:`edge.instruments.energy.Work`."""

    repository: Repository
    scheduler: Scheduler

    def running(self) -> bool:
        """Return whether a run is in progress."""
        return any(run is not None for run in self.scheduler.runs.now)

    def run_count(self) -> int:
        """Return a number that changes whenever a run ends."""
        return sum(entry.statistics.execution_count for entry in self.repository)

    def loading(self) -> bool:
        """Return whether a model is loading."""
        return any(entry.state == "LOADING" for entry in self.repository)

    def runs(self) -> dict[ModelTier, TierRuns]:
        """Return all runs since the start."""
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
