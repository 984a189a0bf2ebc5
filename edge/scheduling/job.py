"""One request from the check of its tensors to its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, Literally
from edge.instruments.snapshot import Timings
from edge.instruments.statistics import ModelStatistics
from edge.scheduling.batching import byte_size
from edge.scheduling.drift import Promise
from edge.scheduling.lane import Lane
from edge.scheduling.use_count import UseCount

#: Priority 1 is the highest; a request that names none, or 0, has the default.
PRIORITY_LEVELS: Final = 10
DEFAULT_PRIORITY: Final = 5


class Answer(NamedTuple):
    """The result of one job: its rows of the outputs of the graph, and its rows of the program's facts.

    Attributes:
        outputs: by name.
        facts: by name, [rows] each.
        nonfinite: the outputs that hold a NaN or an infinity.
    """

    outputs: dict[str, Array]
    facts: Mapping[str, Array]
    nonfinite: tuple[str, ...] = ()


class Job:
    """A request on its way through the scheduler.

    A job ends in one of three ways: with an ``answer``, with an ``error``, or dropped, because it was cancelled before
    its run began. In the first two cases ``deliver`` is called with it, once, unless
    :meth:`edge.scheduling.scheduler.Scheduler.submit` says that it ended at once.

    Args:
        lane: the tier that computes it.
        inputs: of the graph, checked.
        rows: of the inputs.
        deliver: called with jobs that have ended, on the thread that ended them. Jobs of one run that have the same
            ``deliver`` are delivered together.
        priority: 1 to :data:`PRIORITY_LEVELS`.
        deadline: ``time.monotonic()`` seconds at which the answer is too late.
        use: the use count of the model, of which the job is a user until its run is over or will not be.
        statistics: where runs are counted.
        size, size_bytes, shapes: as below, where they are known already.

    Attributes:
        options: how the program computes it.
        size: what the time of its run grows with.
        order: by what waiting requests are sorted, once it waits: priority, then arrival.
        ready_at: ``time.monotonic()`` seconds until which it may wait for others to join it.
        cancelled: whether nobody wants the answer any more.
        started: whether its run has begun.
        batch_rows: of the run that answered it; 0 before.
        computed_ns: when its run ended, by ``time.perf_counter_ns()``; 0 before.
        nonfinite: 1 where its answer holds a NaN or an infinity, else 0.
        promise: what it was let in with; None where it had no deadline, or did not have to wait.
        answer: its result; None while there is none.
        error: why there is none; None while that is not known.
    """

    __slots__ = (
        "_shapes",
        "_size_bytes",
        "answer",
        "batch_rows",
        "cancelled",
        "computed_ns",
        "deadline",
        "deliver",
        "error",
        "inputs",
        "lane",
        "nonfinite",
        "options",
        "order",
        "priority",
        "promise",
        "queued_ns",
        "ready_at",
        "rows",
        "size",
        "started",
        "statistics",
        "timings",
        "use",
    )

    def __init__(
        self,
        lane: Lane,
        inputs: Mapping[str, Array],
        rows: int,
        *,
        deliver: Callable[[Sequence[Job]], None] = lambda jobs: None,
        priority: int = DEFAULT_PRIORITY,
        deadline: float | None = None,
        use: UseCount | None = None,
        statistics: ModelStatistics | None = None,
        size: int = 0,
        size_bytes: int = -1,
        shapes: Hashable = None,
    ) -> None:
        self.lane = lane
        self.options = lane.options
        self.inputs = inputs
        self.rows = rows
        self.size = size or lane.joiner.size(inputs)
        self.deliver = deliver
        self.priority = priority
        self.deadline = deadline
        self.use = use
        self.statistics = statistics
        self.timings = Timings()
        self.queued_ns = time.perf_counter_ns()
        self.order = (priority, 0)
        self.ready_at = 0.0
        self.cancelled = False
        self.started = False
        self.batch_rows = 0
        self.computed_ns = 0
        self.nonfinite = 0
        self.promise: Promise | None = None
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self._shapes = shapes
        self._size_bytes = size_bytes

    @property
    def key(self) -> Hashable:
        """What it must have in common with others to share a run."""
        lane = self.lane
        return (lane, self.options, self.shapes if lane.max_rows else None)

    @property
    def shapes(self) -> Hashable:
        """What the lane's joiner says that inputs must have in common to be joined."""
        if self._shapes is None:
            self._shapes = self.lane.joiner.key(self.inputs)
        return self._shapes

    @property
    def ended(self) -> bool:
        """Whether there is an answer or an error, or a run of it is over."""
        return self.answer is not None or self.error is not None or self.computed_ns > 0

    @property
    def place(self) -> str:
        """Where it is: ``queued``, ``running``, or ``answered`` when the run that gave its answer is over."""
        return "queued" if not self.started else "answered" if self.computed_ns else "running"

    @property
    def size_bytes(self) -> int:
        """The bytes that it holds while it waits."""
        if self._size_bytes < 0:
            self._size_bytes = byte_size(self.inputs)
        return self._size_bytes

    def take_error(self) -> BaseException | None:
        """Return the error and let go of it.

        Its traceback holds the frames of the run, and these the job: if the job held the error too, the circle would
        keep the request's tensors until Python's collector came by.
        """
        error, self.error = self.error, None
        return error

    def expire(self) -> None:
        """End it with the error of a request whose deadline passed while it waited."""
        self.error = expired(time.perf_counter_ns() - self.queued_ns)


def deliver(jobs: Iterable[Job]) -> None:
    """Hand jobs that have ended to those who wait for them."""
    for to, ended in groupby(jobs, key=attrgetter("deliver")):
        to(list(ended))


def expired(waited_ns: int) -> DeadlineExceeded:
    """Return the error of a request whose deadline passed while it waited."""
    return DeadlineExceeded(
        "request",
        given=Literally(f"{waited_ns / 1e6:.1f} ms of waiting"),
        expected="its turn before the deadline",
        fix="Allow more time, send fewer requests at once, or ask a leaner model.",
    )
