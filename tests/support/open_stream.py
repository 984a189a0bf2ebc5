"""A stream of requests that a test feeds as it goes."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from typing import Any


class Sender:
    """The requests of a stream that stays open until None is put into the queue."""

    def __init__(self) -> None:
        self.queue: Queue[Any] = Queue()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.queue.get, None)
