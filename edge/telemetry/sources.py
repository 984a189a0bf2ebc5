"""What is told of a server is read from here, by whoever tells it."""

from __future__ import annotations

from typing import NamedTuple

from edge.health.health import Health
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.serving.streams import Streams


class Sources(NamedTuple):
    """The parts of a server that count and know.

    Attributes:
        repository: the models and their counters.
        scheduler: the queue.
        health: what is wrong, if anything is.
        memory: where memory is read.
        sensors: those of the board.
        streams: the streams that are open.
    """

    repository: Repository
    scheduler: Scheduler
    health: Health
    memory: MemorySampler
    sensors: Sensors
    streams: Streams
