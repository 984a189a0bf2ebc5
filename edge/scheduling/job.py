"""A request in the scheduler, from its submission to its answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, Raw
from edge.instruments.snapshot import Timings
from edge.instruments.statistics import ModelStatistics
from edge.programs.program import HandedOut, Options
from edge.scheduling.batching import byte_size
from edge.scheduling.latency import LatencyEstimate
from edge.scheduling.tier_executor import TierExecutor

#: Priority 1 is the highest; a request without a priority, or with 0, has the default.
PRIORITY_LEVELS: Final = 10
DEFAULT_PRIORITY: Final = 5
#: Partial answers of a job that may wait for their reader, so that a slow one delays nobody.
MOST_PARTIAL_ANSWERS: Final = 8


class JobResult(NamedTuple):
    """One job's rows of the graph's outputs and of the program's facts, by name."""

    outputs: dict[str, Array]
    facts: Mapping[str, Array]  # [rows] each
    nonfinite: tuple[str, ...] = ()  # names of the outputs that contain a NaN or an infinity


class UseCount:
    """Counts the users of a model, on any thread, so that it is closed only after the last one has left."""

    def __init__(self) -> None:
        self.users = 0
        self.unused_since = time.monotonic()  # or, while it has users, when it last had none
        self._lock = threading.Lock()
        self._ended = False
        self._unused: Future[None] = Future()
        # A running future cannot be cancelled, so a waiter that is cancelled leaves the other waiters alone.
        self._unused.set_running_or_notify_cancel()

    def take(self) -> bool:
        """Become a user. Returns False, and counts no user, after :meth:`end`."""
        with self._lock:
            if self._ended:
                return False
            self.users += 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self.users -= 1
            if not self.users:
                self.unused_since = time.monotonic()
            unused = self._ended and not self.users
        if unused:
            self._unused.set_result(None)

    def end(self) -> None:
        """Reject further users. Calling it again changes nothing."""
        with self._lock:
            unused = not self._ended and not self.users
            self._ended = True
        if unused:
            self._unused.set_result(None)

    async def wait_unused(self) -> None:
        """Wait until :meth:`end` has been called and the last user has left."""
        await asyncio.wrap_future(self._unused)


class Hold(Protocol):
    """What a request holds until it has ended: the use of a model, or memory."""

    def give_back(self) -> None:
        """Release it."""


def take_all(uses: Sequence[UseCount]) -> bool:
    """Become a user of all models, or return False and become a user of none."""
    for taken, use in enumerate(uses):
        if not use.take():
            for earlier in uses[:taken]:
                earlier.give_back()
            return False
    return True


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the scheduler.

    A job ends with an ``answer`` or an ``error``, or is dropped because it was cancelled before its run began. In the
    first two cases ``deliver`` is called with it, once, on the thread that ended it, unless ``Scheduler.submit``
    returned that it had ended already. Jobs of one run with the same ``deliver`` are delivered together. A job with
    ``partials`` is passed to ``publish``, on the worker's thread, when one is added to none; its reader takes them all.
    Deadlines are in seconds of ``time.monotonic()``, other times in ns of ``time.perf_counter_ns()``.
    """

    executor: TierExecutor
    inputs: Mapping[str, Array]  # of the graph, already validated
    rows: int
    _: KW_ONLY
    deliver: Callable[[Sequence[Job]], None] = lambda jobs: None
    publish: Callable[[Job], None] = lambda job: None
    options: Options = None  # type: ignore[assignment] # of the program; None takes the executor's
    partials: deque[JobResult] | None = None  # gets the outputs so far, or new text, after each step; None wants none
    handed_out: list[HandedOut] = field(default_factory=list)  # what earlier answers had of each row's text
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    holds: Sequence[Hold] = ()  # until the run has ended or is ruled out
    statistics: ModelStatistics | None = None
    size: int = 0  # elements that the time of the run grows with; 0 computes it
    size_bytes: int = -1  # of the inputs; -1 computes it
    shapes: Hashable = None  # the assembler's key; None computes it
    timings: Timings = field(default_factory=Timings)
    queued_ns: int = field(default_factory=time.perf_counter_ns)
    order: tuple[int, int] = (0, 0)  # in the queue: priority, then arrival
    ready_at: float = 0.0  # until then it may wait for others to join it
    repeats: float = 1.0  # of the step of an iterative program, predicted while it waits
    best_effort: bool = False  # whether it is cut at the deadline, and answered with what there is, as loops can be
    cancelled: bool = False
    started: bool = False
    batch_rows: int = 0  # of the run that answered it
    computed_ns: int = 0  # end of its run; 0 before
    nonfinite: int = 0  # 1 if the answer contains a NaN or an infinity
    estimate: LatencyEstimate | None = None  # None if it did not have to wait for a deadline
    answer: JobResult | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        assembler = self.executor.assembler
        self.options = self.options or self.executor.options
        self.size = self.size or assembler.size(self.inputs)
        if self.size_bytes < 0:
            self.size_bytes = byte_size(self.inputs)
        if self.shapes is None:
            self.shapes = assembler.key(self.inputs)

    @property
    def key(self) -> Hashable:
        """Jobs with equal keys may share a run; a session takes rows of any length."""
        joined = self.executor.max_rows and not self.executor.iterative
        return (self.executor, self.options.tier, self.shapes if joined else None)

    @property
    def ended(self) -> bool:
        """Whether it has an answer or an error, or its run has ended."""
        return self.answer is not None or self.error is not None or self.computed_ns > 0

    @property
    def stage(self) -> str:
        """Return ``queued``, ``running``, or ``answered`` after the end of its run."""
        return "queued" if not self.started else "answered" if self.computed_ns else "running"

    def leaves(self, now: float) -> bool:
        """Return whether it is not to be computed: it was cancelled, or its deadline has passed, which is its error."""
        if self.cancelled or self.deadline is None or self.deadline > now:
            return self.cancelled
        self.expire()
        return True

    def finish(self, answer: JobResult, computed_ns: int, batch_rows: int) -> None:
        """End it with its answer from a run of so many rows, which ended at ``computed_ns``."""
        self.computed_ns, self.batch_rows, self.nonfinite = computed_ns, batch_rows, int(bool(answer.nonfinite))
        self.answer = answer

    def take_error(self) -> BaseException | None:
        """Return the error and drop the reference to it: its traceback refers to the job, a cycle that keeps the
        tensors.
        """
        error, self.error = self.error, None
        return error

    def expire(self) -> None:
        """Set the error of a request whose deadline passed while it waited."""
        self.error = expired(time.perf_counter_ns() - self.queued_ns)


def deliver(jobs: Iterable[Job]) -> None:
    """Pass jobs that have ended to their ``deliver``, those with the same one together."""
    for to, ended in groupby(jobs, key=attrgetter("deliver")):
        to(list(ended))


def expired(waited_ns: int) -> DeadlineExceeded:
    """Return the error of a request whose deadline passed while it waited."""
    return DeadlineExceeded(
        "request",
        given=Raw(f"{waited_ns / 1e6:.1f} ms of waiting"),
        expected="its turn before the deadline",
        fix="Allow more time, send fewer requests at once, or use a leaner tier or model.",
    )
