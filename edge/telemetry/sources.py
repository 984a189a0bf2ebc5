"""What is told of a server is read from here, by whoever tells it."""

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
    """What may be wrong with files that the server follows."""

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""


class Sources(NamedTuple):
    """The parts of a server that count and know.

    Attributes:
        repository: the models and their counters.
        scheduler: the queue.
        health: what is wrong, if anything is.
        memory: where memory is read.
        sensors: those of the board.
        streams: the streams that are open.
        files: what is read again when it changes.
    """

    repository: Repository
    scheduler: Scheduler
    health: Health
    memory: MemorySampler
    sensors: Sensors
    streams: Streams
    files: Sequence[HasProblem] = ()

    def problems(self) -> list[str]:
        """Say what is not as it should be, one sentence each."""
        return [*self.health.problems(), *(file.problem for file in self.files if file.problem)]
