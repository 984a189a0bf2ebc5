"""Executor of one tier: its program, the requests that may share a run, its run times and failures."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, NamedTuple

from edge.datatypes import Array
from edge.errors import RequestError, RunnerError
from edge.programs.generate import Generate
from edge.programs.program import IterativeProgram, Joining, Options, Program
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


class Ahead(NamedTuple):
    """The waiting requests before another one."""

    jobs: int = 0
    rows: int = 0
    size: int = 0
    loops: float = 0.0  # of all rows


@dataclass
class FailureTracker:
    """Consecutive failures of one tier. Workers write, any thread may read.

    A request alone can make a runtime fail: after :data:`SUSPECT_AFTER` in a row the tier runs its golden row.
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
    """Computes the requests of one tier, each in one run, and predicts how long that takes.

    Requests with different executors never share a run. Predictions are in seconds, 0 while no run is known, and of
    ``size`` elements. :class:`LoopExecutor` and :class:`TextExecutor` are for programs that go on step by step.
    """

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
    iterative: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.max_rows:
            self.max_delay_seconds = 0.0
        self.options = Options(self.tier)
        self.failures = FailureTracker()

    def measure(self, inputs: Mapping[str, Array], runs: int) -> None:
        """Compute a request alone some times, and learn from the fastest run; raise as :meth:`Program.compute`.

        A stall of the machine would count in proportion for larger requests, which would then be refused.
        """
        if self.assembler.pads_alone:
            inputs = self.assembler.join([inputs])  # the shape of a request, whose graph is captured
        seconds, repeats = min(self._timed(inputs) for _ in range(runs))
        self.latency.observe(self.assembler.size(inputs), seconds, repeats)

    def _timed(self, inputs: Mapping[str, Array]) -> tuple[float, float]:
        begun = time.perf_counter()
        computed = self.program.compute(inputs, self.options)
        return time.perf_counter() - begun, computed.repeats

    def is_brief(self, size: int, now: float) -> bool:
        """Return whether the submitting thread may compute a run; see :meth:`LatencyModel.is_brief`."""
        return self.latency.is_brief(size, now)

    def repeats(self, options: Options) -> float:
        """Predict how often the step of an iterative program is repeated for a request; 1 for other programs."""
        return 1.0

    def call_size(self, rows: int, size: float) -> int:
        """Return the elements that the time of a run, or of a step, grows with; ``size`` is that of the inputs."""
        return round(size)

    def call_seconds(self, size: int, deviations: float = TAIL_DEVIATIONS) -> float:
        """Predict one run, or one step of an iterative program."""
        return self.latency.seconds(size, deviations) or 0.0

    def join_seconds(self, size: int, deviations: float = TAIL_DEVIATIONS) -> float:
        """Predict the run in which inputs join an iterative program; 0 for other programs."""
        return 0.0

    def first_seconds(self, rows: int, size: int) -> float:
        """Predict the time until a request has its first loop or token, or its answer."""
        return self.call_seconds(size)

    def run_seconds(self, size: int, options: Options | None = None, rows: int = 1, *, beside: int = 0) -> float:
        """Predict a request's run, on the safe side; in an iterative program with ``beside`` rows of others in its
        steps.
        """
        return self.call_seconds(size)

    def seconds(self, jobs: int, rows: int, size: int, loops: float = 0.0) -> float:
        """Predict the runs of so many waiting requests, rows and elements.

        ``loops`` is the sum of the rows' repeats; those of an iterative program go on side by side.
        """
        if not jobs:
            return 0.0
        if not self.max_rows:
            return jobs * self.call_seconds(round(size / jobs), _WAITING_DEVIATIONS)
        each = size / rows
        runs, rest = divmod(rows, self.max_rows)
        seconds = runs * self.call_seconds(round(self.max_rows * each), _WAITING_DEVIATIONS)
        return seconds + (self.call_seconds(round(rest * each), _WAITING_DEVIATIONS) if rest else 0.0)

    def seconds_before_and_of(self, job_rows: int, size: int, options: Options, ahead: Ahead) -> tuple[float, float]:
        """Predict the runs of requests ``ahead`` that a new one does not share, and its own run."""
        if not self.max_rows:
            return self.seconds(*ahead), self.run_seconds(size, options)
        rows, total = ahead.rows + job_rows, ahead.size + size
        earlier = (rows - 1) // self.max_rows * self.max_rows  # rows in runs before its own
        each = total / rows
        before = self.seconds(earlier, earlier, round(earlier * each))
        return before, self.run_seconds(round((rows - earlier) * each), options)


class LoopExecutor(TierExecutor):
    """Computes the requests to a loop, side by side: joining and steps are timed apart, and loops are predicted."""

    iterative = True
    program: IterativeProgram

    def __post_init__(self) -> None:
        super().__post_init__()
        self.joins = LatencyModel()  # of the runs in which requests join
        self.loops = LoopEstimate()

    def measure(self, inputs: Mapping[str, Array], runs: int) -> None:
        size, joins, steps = self.assembler.size(inputs), [], []
        for _ in range(runs):
            begun = time.perf_counter()
            session = self.program.session(self.options)
            ended = session.add([Joining(None, inputs, self.options)])
            joined = time.perf_counter()
            joins.append(joined - begun)
            rows, number = session.rows, 0
            while not ended:
                ended = session.step()
                number += 1
            (finished,) = ended
            if finished.error:
                raise finished.error
            if number:
                steps.append((time.perf_counter() - joined) / number / self.program.loops_per_step)
            self.learn(self.options, finished.computed.repeats)
        self.joins.observe_step(size, min(joins))
        if steps:
            self.latency.observe_step(self.call_size(rows, size), min(steps))

    def is_brief(self, size: int, now: float) -> bool:
        """Return False: the event loop computes no steps."""
        return False

    def learn(self, options: Options, loops: float) -> None:
        """Learn how many loops a request took; its steps are learnt one by one."""
        self.latency.observe_repeats(loops)
        self.loops.observe(options.limits or self.program.limits, loops)

    def repeats(self, options: Options, deviations: float = _WAITING_DEVIATIONS) -> float:
        return self.loops.loops(options.limits or self.program.limits, deviations)

    def most_repeats(self, options: Options) -> int:
        """Return how often the step may be repeated for a request."""
        return (options.limits or self.program.limits).max_loops

    def repeats_left(self, options: Options, done: int) -> float:
        """Predict the repeats left after ``done``; a request that took longer than expected takes as many again."""
        expected, most = self.repeats(options), self.most_repeats(options)
        return expected - done if done < expected else min(done, most - done)

    def call_seconds(self, size: int, deviations: float = TAIL_DEVIATIONS) -> float:
        return (self.latency.step_seconds(size, deviations) or 0.0) * self.program.loops_per_step

    def join_seconds(self, size: int, deviations: float = TAIL_DEVIATIONS) -> float:
        return self.joins.step_seconds(size, deviations) or 0.0

    def first_seconds(self, rows: int, size: int) -> float:
        return self.join_seconds(size) + self.call_seconds(self.call_size(rows, size))

    def run_seconds(self, size: int, options: Options | None = None, rows: int = 1, *, beside: int = 0) -> float:
        step = self.latency.step_seconds(self.call_size(rows + beside, size / rows * (rows + beside)), TAIL_DEVIATIONS)
        return self.join_seconds(size) + (step or 0.0) * self.repeats(options or self.options, TAIL_DEVIATIONS)

    def seconds(self, jobs: int, rows: int, size: int, loops: float = 0.0) -> float:
        if not jobs:
            return 0.0
        limit = max(self.max_rows, 1)
        step = self.latency.step_seconds(self.call_size(limit, limit * size / rows), _WAITING_DEVIATIONS) or 0.0
        return self.join_seconds(size, _WAITING_DEVIATIONS) + loops / limit * step

    def seconds_before_and_of(self, job_rows: int, size: int, options: Options, ahead: Ahead) -> tuple[float, float]:
        """Predict requests ``ahead``, and a new one beside as many rows as there may be: the server is busy."""
        beside = max(self.max_rows - job_rows, 0)
        return self.seconds(*ahead), self.run_seconds(size, options, job_rows, beside=beside)


class TextExecutor(LoopExecutor):
    """Generates texts: the run of a prompt gives the first token, and the time of a step grows with the rows alone."""

    program: Generate

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = LatencyModel()  # of texts by ``max_tokens``, instead of seconds by size

    def learn(self, options: Options, loops: float) -> None:
        """Learn how many tokens the text of a request has."""
        self.latency.observe_repeats(loops - 1)
        self.tokens.observe_step(self.most_repeats(options) + 1, loops)

    def repeats(self, options: Options, deviations: float = _WAITING_DEVIATIONS) -> float:
        """Predict the tokens after the first one: the known share of ``max_tokens`` above all known numbers."""
        most = self.most_repeats(options) + 1
        return min(self.tokens.step_seconds(most, deviations) or math.inf, most) - 1

    def most_repeats(self, options: Options) -> int:
        """Return the most tokens after the first one."""
        return (options.sampling or self.program.sampling).max_tokens - 1

    def call_size(self, rows: int, size: float) -> int:
        return rows

    def first_seconds(self, rows: int, size: int) -> float:
        return self.join_seconds(size)


def executor_class(program: Program) -> type[TierExecutor]:
    """Return the class of executors for a program."""
    if not isinstance(program, IterativeProgram):
        return TierExecutor
    return TextExecutor if isinstance(program, Generate) else LoopExecutor
