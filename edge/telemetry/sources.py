"""Data sources of everything that reports on a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edge.health.health import Health
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.serving.streams import Streams


class HasProblem(Protocol):
    """A followed file, or a group of them, that may be wrong."""

    @property
    def problem(self) -> str:
        """The error, as a sentence; empty if there is none."""


class Sources(NamedTuple):
    """The parts of a server that have data.

    Attributes:
        repository: the models and their counters.
        scheduler: the queue.
        health: of the server and its models.
        memory: where memory is read.
        sensors: those of the board.
        streams: the streams that are open.
        files: certificates and tokens, which are read again when they change.
    """

    repository: Repository
    scheduler: Scheduler
    health: Health
    memory: MemorySampler
    sensors: Sensors
    streams: Streams
    files: Sequence[HasProblem] = ()

    def problems(self) -> list[str]:
        """Return why the server or a part of it is not healthy, one sentence each."""
        return [*self.health.problems(), *(file.problem for file in self.files if file.problem)]
