"""Executor of one tier: its program, the requests that may share a run, its run times and failures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from edge.datatypes import Array
from edge.errors import RequestError, RunnerError
from edge.programs.program import IterativeProgram, Joining, LoopLimits, Options, Program
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.latency import LatencyModel, LoopEstimate

#: Consecutive failures after which the supervisor runs a tier's golden row, to tell a broken tier from wrong requests.
SUSPECT_AFTER = 3
#: Mean deviations added to the mean of a request's own run.
TAIL_DEVIATIONS = 2.0
#: The same for the runs before it. The cause of a slow one, such as a busy neighbour, often slows all of them.
_WAITING_DEVIATIONS = 1.0


class ServingOptions(NamedTuple):
    """Options of a server for all its models. Those that are None come from each manifest."""

    instances: int = 1  # runs computed at once
    batching: bool = True  # whether requests may share a run
    max_queue_delay_us: int | None = None  # how long a request that finds the server busy may wait for others
    policy: str | None = None


@dataclass
class FailureTracker:
    """Consecutive failures of one tier. Workers write, any thread may read.

    A request can make a runtime fail, for example with a token that the model does not know, so failures alone prove
    nothing: after :data:`SUSPECT_AFTER` in a row the tier is suspect, and it is broken when its golden row fails too.
    """

    count: int = 0  # since the last success; of workers that fail at the same moment, one may be lost
    broken: str = ""  # the reason

    @property
    def suspect(self) -> bool:
        """Whether the tier has to run its golden row, because it may be broken or still is."""
        return self.count >= SUSPECT_AFTER or bool(self.broken)

    def succeeded(self) -> None:
        """Record a run that gave an answer; the tier is sound."""
        self.count, self.broken = 0, ""

    def failed(self, error: BaseException) -> None:
        """Record a run that failed. An error that only the request caused does not count."""
        if isinstance(error, RunnerError) or not isinstance(error, RequestError):
            self.count += 1

    def mark_broken(self, reason: str) -> None:
        """Record that the tier failed on its golden row."""
        self.count, self.broken = max(self.count, 1), reason


@dataclass(eq=False)
class TierExecutor:
    """Computes the requests of one tier. Requests with different executors never share a run."""

    tier: str
    program: Program
    assembler: BatchAssembler
    _: KW_ONLY
    max_rows: int = 0  # limit on the rows of a run; 0 disables batching
    max_delay_seconds: float = 0.0  # how long a request that finds the server busy may wait for others to join it
    preferred_rows: tuple[int, ...] = ()  # sizes that a run should have; without any, a run takes all that waits
    model: str = ""  # as ``name:version``
    on_gpu: bool = False  # whether an error can mean that the process has lost its device
    latency: LatencyModel = field(default_factory=LatencyModel)

    def __post_init__(self) -> None:
        if not self.max_rows:
            self.max_delay_seconds = 0.0
        self.options = Options(self.tier)
        self.iterative = isinstance(self.program, IterativeProgram)
        # The run of a prompt gives the first token of a text, so its steps are one fewer than its tokens.
        self._joining_loops = int(isinstance(self.program, IterativeProgram) and self.program.generates)
        self.joins = LatencyModel()  # of the runs in which requests join an iterative program
        self.loops = LoopEstimate()
        self.failures = FailureTracker()

    def measure(self, inputs: Mapping[str, Array]) -> None:
        """Compute a request alone, and learn from it; raise as :meth:`Program.compute`."""
        if self.assembler.pads_alone and not self.iterative:
            inputs = self.assembler.join([inputs])  # the shape of a request, whose graph is captured
        size, begun = self.assembler.size(inputs), time.perf_counter()
        if not isinstance(self.program, IterativeProgram):
            computed = self.program.compute(inputs, self.options)
            self.latency.observe(size, time.perf_counter() - begun, computed.repeats)
            return
        session = self.program.session(self.options)
        ended = session.add([Joining(None, inputs, self.options)])
        joined = time.perf_counter()
        self.joins.observe_step(size, joined - begun)
        rows, steps = session.rows, 0
        while not ended:
            ended = session.step()
            steps += 1
        (finished,) = ended
        if finished.error:
            raise finished.error
        if steps:
            seconds = (time.perf_counter() - joined) / steps / self.program.loops_per_step
            self.latency.observe_step(self.call_size(rows, size), seconds)
        self.learn(self.options, finished.computed.repeats)

    def is_brief(self, size: int, now: float) -> bool:
        """Return whether the submitting thread may compute a run; see :meth:`LatencyModel.is_brief`."""
        return not self.iterative and self.latency.is_brief(size, now)

    def limits(self, options: Options) -> LoopLimits:
        """Return the limits of a request to an iterative program."""
        assert isinstance(self.program, IterativeProgram)
        return options.limits or self.program.limits

    def learn(self, options: Options, loops: float) -> None:
        """Learn how many loops a request to an iterative program took; its steps are learnt one by one."""
        self.latency.observe_repeats(loops - self._joining_loops)
        self.loops.observe(self.limits(options), loops)

    def repeats(self, options: Options, deviations: float = _WAITING_DEVIATIONS) -> float:
        """Predict how often the step of an iterative program is repeated for a request; 1 for other programs."""
        return self.loops.loops(self.limits(options), deviations) - self._joining_loops if self.iterative else 1.0

    def repeats_left(self, options: Options, done: int) -> float:
        """Predict the repeats left after ``done``; a request that took longer than expected takes as many again."""
        expected, most = self.repeats(options), self.limits(options).max_loops - self._joining_loops
        return expected - done if done < expected else min(done, most - done)

    def call_size(self, rows: int, size: float) -> int:
        """Return the elements that the time of a run, or of a step of an iterative program, grows with.

        Args:
            size: elements of the inputs of all rows.
        """
        return rows if isinstance(self.program, IterativeProgram) and self.program.generates else round(size)

    def call_seconds(self, size: int, deviations: float = TAIL_DEVIATIONS) -> float:
        """Predict one run, or one step of an iterative program, of ``size`` elements; 0 while none is known."""
        if self.iterative:
            assert isinstance(self.program, IterativeProgram)
            return (self.latency.step_seconds(size, deviations) or 0.0) * self.program.loops_per_step
        return self.latency.seconds(size, deviations) or 0.0

    def join_seconds(self, size: int, deviations: float = TAIL_DEVIATIONS) -> float:
        """Predict the run in which inputs of ``size`` elements join an iterative program; 0 while none is known."""
        return self.joins.step_seconds(size, deviations) or 0.0

    def first_seconds(self, rows: int, size: int) -> float:
        """Predict the time until a request to an iterative program has joined and has its first loop or token."""
        joined = self.join_seconds(size)
        return joined if self._joining_loops else joined + self.call_seconds(self.call_size(rows, size))

    def run_seconds(self, size: int, options: Options | None = None, rows: int = 1, *, beside: int = 0) -> float:
        """Predict a request's run, on the safe side; 0 while no run is known.

        Args:
            size: elements of its inputs.
            options, rows: of a request to an iterative program.
            beside: rows of others, of the same size, in its steps.
        """
        if not self.iterative:
            return self.latency.seconds(size, TAIL_DEVIATIONS) or 0.0
        step = self.latency.step_seconds(self.call_size(rows + beside, size / rows * (rows + beside)), TAIL_DEVIATIONS)
        return self.join_seconds(size) + (step or 0.0) * self.repeats(options or self.options, TAIL_DEVIATIONS)

    def seconds(self, jobs: int, rows: int, size: int, loops: float = 0.0) -> float:
        """Predict the runs of so many waiting requests, rows and elements; 0 while no run is known.

        ``loops`` is the sum of the rows' repeats; those of an iterative program go on side by side.
        """
        if not jobs:
            return 0.0
        if not self.max_rows and not self.iterative:
            return jobs * self._waiting_seconds(size / jobs)
        each = size / rows
        if self.iterative:
            limit = max(self.max_rows, 1)
            step = self.latency.step_seconds(self.call_size(limit, limit * each), _WAITING_DEVIATIONS) or 0.0
            return self.join_seconds(size, _WAITING_DEVIATIONS) + loops / limit * step
        runs, rest = divmod(rows, self.max_rows)
        seconds = runs * self._waiting_seconds(self.max_rows * each)
        return seconds + (self._waiting_seconds(rest * each) if rest else 0.0)

    def _waiting_seconds(self, size: float) -> float:
        return self.latency.seconds(round(size), _WAITING_DEVIATIONS) or 0.0
