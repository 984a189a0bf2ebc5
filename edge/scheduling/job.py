"""A request in the scheduler, from its submission to its answer."""

from __future__ import annotations

import asyncio
import threading
import time
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
from edge.programs.program import Options
from edge.scheduling.batching import byte_size
from edge.scheduling.job import Answer, PartialAnswers
from edge.scheduling.latency import LatencyEstimate
from edge.scheduling.tier_executor import TierExecutor

#: Priority 1 is the highest; a request without a priority, or with 0, has the default.
PRIORITY_LEVELS: Final = 10
DEFAULT_PRIORITY: Final = 5


class UseCount:
    """Counts the users of a model, on any thread, so that it is closed only after the last one has left.

    To close it, call :meth:`end`, await :meth:`wait_unused`, and then close it on the thread that owns it.
    """

    def __init__(self) -> None:
        self.users = 0
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
        """Stop being a user."""
        with self._lock:
            self.users -= 1
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


class Use(Protocol):
    """What a request holds while it needs a model; see :class:`UseCount`."""

    def take(self) -> bool:
        """Become a user, if that is still possible."""

    def give_back(self) -> None:
        """Stop being a user."""


class BothUses(NamedTuple):
    """The use of two models at once."""

    first: Use
    second: Use

    def take(self) -> bool:
        """Become a user of both, or of none."""
        if not self.first.take():
            return False
        if not self.second.take():
            self.first.give_back()
            return False
        return True

    def give_back(self) -> None:
        """Stop being a user of both."""
        self.first.give_back()
        self.second.give_back()


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the scheduler.

    A job ends with an ``answer`` or an ``error``, or is dropped because it was cancelled before its run began. In the
    first two cases ``deliver`` is called with it, once, on the thread that ended it, unless ``Scheduler.submit``
    returned that it had ended already. Jobs of one run with the same ``deliver`` are delivered together. A job with
    ``partials`` is passed to ``tell``, on the worker's thread, when one waits and its reader has not been told yet.
    Deadlines are in seconds of ``time.monotonic()``, other times in ns of ``time.perf_counter_ns()``.
    """

    executor: TierExecutor
    inputs: Mapping[str, Array]  # of the graph, already validated
    rows: int
    _: KW_ONLY
    deliver: Callable[[Sequence[Job]], None] = lambda jobs: None
    tell: Callable[[Job], None] = lambda job: None
    options: Options = None  # type: ignore[assignment] # of the program; None takes the executor's
    partials: PartialAnswers | None = None  # gets one after each step of an iterative program
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    use: Use | None = None  # of the model, held until the run has ended or is ruled out
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
    answer: Answer | None = None
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
    def place(self) -> str:
        """Its stage: ``queued``, ``running``, or ``answered`` after the end of its run."""
        return "queued" if not self.started else "answered" if self.computed_ns else "running"

    def leaves(self, now: float) -> bool:
        """Return whether it is not to be computed: it was cancelled, or its deadline has passed, which is its error."""
        if self.cancelled or self.deadline is None or self.deadline > now:
            return self.cancelled
        self.expire()
        return True

    def finish(self, answer: Answer, computed_ns: int, batch_rows: int) -> None:
        """End it with its answer from a run of so many rows, which ended at ``computed_ns``."""
        self.computed_ns, self.batch_rows, self.nonfinite = computed_ns, batch_rows, int(bool(answer.nonfinite))
        self.answer = answer

    def take_error(self) -> BaseException | None:
        """Return the error and drop the reference to it.

        The frames of its traceback refer to the job. The cycle would keep the request's tensors until Python's
        collector runs.
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
