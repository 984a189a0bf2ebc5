"""One request between the check of its tensors and its answer: what it needs, and the future of what it gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import NamedTuple

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, Literally
from edge.instruments.statistics import ModelStatistics, Timings
from edge.scheduling.batching import byte_size
from edge.scheduling.drift import Promise
from edge.scheduling.lane import Lane
from edge.scheduling.lease import Lease

#: Priority 1 is the highest; a request that names none, or 0, has the default.
PRIORITY_LEVELS = 10
DEFAULT_PRIORITY = 5


class Answer(NamedTuple):
    """The outputs of the graph, and which tiers gave them."""

    outputs: dict[str, Array]
    tier: str


class Job(Future[Answer]):
    """A request that waits for its run, and the future of its answer. Cancelling it drops it wherever it waits.

    Args:
        lane: the tier that shall compute it.
        inputs: of the graph, checked.
        rows: of the inputs.
        priority: 1 to :data:`PRIORITY_LEVELS`.
        deadline: ``time.monotonic()`` seconds at which the answer is too late.
        lease: of the model; it is given back when the run is over or will not be.
        statistics: where runs are counted.

    Attributes:
        size: what the time of its run grows with.
        order: by what waiting requests are sorted, once it waits: priority, then arrival.
        ready_at: ``time.monotonic()`` seconds until which it may wait for others to join it.
        started: whether its run has begun.
        batch_rows: of the run that answered it; 0 before.
        computed_ns: when its run ended, by ``time.perf_counter_ns()``; 0 before.
        on_cancel: told when it is cancelled.
        promise: what it was let in with; None where it had no deadline, or did not have to wait.
    """

    order: tuple[int, int] = (DEFAULT_PRIORITY, 0)
    ready_at = 0.0
    started = False
    batch_rows = 0
    computed_ns = 0
    on_cancel: Callable[[Job], None] | None = None
    promise: Promise | None = None

    def __init__(
        self,
        lane: Lane,
        inputs: Mapping[str, Array],
        rows: int,
        *,
        priority: int = DEFAULT_PRIORITY,
        deadline: float | None = None,
        lease: Lease | None = None,
        statistics: ModelStatistics | None = None,
    ) -> None:
        super().__init__()
        self.lane = lane
        self.inputs = inputs
        self.rows = rows
        self.size = lane.joiner.size(inputs)
        self.priority = priority
        self.deadline = deadline
        self.lease = lease
        self.statistics = statistics
        self.timings = Timings()
        self.queued_ns = time.perf_counter_ns()

    @property
    def key(self) -> Hashable:
        """What it must have in common with others to share a run."""
        return (self.lane, self.lane.joiner.key(self.inputs) if self.lane.max_rows else None)

    @property
    def place(self) -> str:
        """Where it is: ``queued``, ``running``, or ``answered`` when the run that gave its answer is over."""
        return "queued" if not self.started else "answered" if self.computed_ns else "running"

    @cached_property
    def size_bytes(self) -> int:
        """The bytes that it holds while it waits."""
        return byte_size(self.inputs)

    def cancel(self) -> bool:
        """Drop it if its run has not begun; see :meth:`concurrent.futures.Future.cancel`."""
        done = super().cancel()
        if done and self.on_cancel:
            self.on_cancel(self)
        return done

    def expire(self) -> None:
        """End it with the error of a request whose deadline passed while it waited."""
        self.set_exception(expired(time.perf_counter_ns() - self.queued_ns))


def expired(waited_ns: int) -> DeadlineExceeded:
    """Return the error of a request whose deadline passed while it waited."""
    return DeadlineExceeded(
        "request",
        given=Literally(f"{waited_ns / 1e6:.1f} ms of waiting"),
        expected="its turn before the deadline",
        fix="Allow more time, send fewer requests at once, or ask a leaner model.",
    )
