"""A worker thread of the scheduler, with what it computes now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from edge.scheduling.continuous import ContinuousRun
from edge.scheduling.job import Job
from edge.scheduling.runs import Run


class Worker:
    """A thread that computes. Its inbox takes runs and the server's own work; None ends it, [] makes it wake up."""

    def __init__(self, index: int, main: Callable[[Worker], None]) -> None:
        self.index = index
        self.inbox: SimpleQueue[list[Job] | Callable[[], None] | None] = SimpleQueue()
        self.run: Run | None = None  # the last one
        self.lent = False  # whether another thread computes in its place
        self.continuous: tuple[ContinuousRun, ...] = ()  # its current ones, of different executors
        self.jobs: list[Job] = []  # in its runs now
        self.stepped: list[Job] = []  # in its continuous runs now
        self.busy = False  # whether its last run was followed by another one without a pause
        self.start_seconds = 0.0  # mean time that the start of a run takes
        self.thread = threading.Thread(target=main, args=(self,), name=f"device-{index}", daemon=True)
