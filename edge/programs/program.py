"""Programs, which compute requests with one or several runners: single runs, cascades, and those of many steps."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np

from edge.bundles.programs import CascadeProgram
from edge.datatypes import Array
from edge.errors import RunnerError
from edge.programs.sampling import Sampling
from edge.runner import OverlappingRunner, Runner

T = TypeVar("T")

#: Stands for a tier, and leaves the choice among them to the program.
AUTO: Final = "auto"
#: Facts of a row: the tier that answered it, and the number of tokens of its text.
TIER: Final = "tier"
TOKENS: Final = "tokens"


class LoopLimits(NamedTuple):
    """When a row ends: after ``max_loops``, or when its residual is at most ``tolerance``."""

    max_loops: int
    tolerance: float


class Mover(Protocol):
    """A head, which moves logits; see :class:`edge.programs.backward_head.LogitHead`."""

    def move(self, logits: Array, alpha: Array) -> Array:
        """Return new logits [N, vocabulary] for logits of that shape and alphas [N, 1]."""


class AppliedHead(NamedTuple):
    """A head, and how much it moves the logits."""

    head: Mover
    alpha: float


class Options(NamedTuple):
    """How to compute one request. Requests share a run only if they are for the same tier."""

    tier: str  # its name, or that of the program's own choice of tiers
    limits: LoopLimits | None = None  # of a loop; None takes the manifest's
    sampling: Sampling | None = None  # of generated text; None takes the manifest's
    head: AppliedHead | None = None  # of generated text

    def of_one_request(self) -> Options:
        """Return options with a seed, if tokens are drawn: a request that begins anew must draw the same ones."""
        sampling = self.sampling
        if not sampling or not sampling.temperature or sampling.seed is not None:
            return self
        return self._replace(sampling=sampling._replace(seed=secrets.randbits(63)))


class Computed(NamedTuple):
    """The result of one run."""

    outputs: dict[str, Array]  # of the graph, rows first if the model has a batch dimension
    facts: Mapping[str, Array] = MappingProxyType({})  # about each row, [rows] each, such as the tier that answered it
    repeats: float = 1.0  # of the program's basic step, 1 or more, which its time is proportional to; tokens of a text


class Program(ABC):
    """Computes the requests of one model, on the device's thread, or on several threads at once on the CPU."""

    @property
    def cache_bytes(self) -> int | None:
        """Memory of the keys and values of the texts in progress; None if it generates none."""
        return None

    def most_cache_bytes(self, inputs: Mapping[str, Array], options: Options) -> int:
        """Return the size of the keys and values of a request's texts at their greatest length; 0 if it has none."""
        return 0

    @abstractmethod
    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Compute one request, or several whose inputs were joined; raise as :meth:`edge.runner.Runner.infer`."""

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed] | None:
        """Start a run on a device that computes by itself; None if the run can only be computed. Raise as
        :meth:`compute`.

        The function returned waits for the result, and raises the same; call them in the order of the starts.
        """
        return None

    def close(self) -> None:  # noqa: B027  # most programs keep nothing
        """Drop what it keeps on the device between requests; called before its runners are closed."""


class SingleRun(Program):
    """Runs one tier once: the program of every bundle that names no other."""

    def __init__(self, runners: Mapping[str, Runner]) -> None:
        self._runners = runners
        self._start = {tier: runner.start for tier, runner in runners.items() if isinstance(runner, OverlappingRunner)}

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        return Computed(self._runners[options.tier].infer(inputs))

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed] | None:
        if not (start := self._start.get(options.tier)):
            return None
        result = start(inputs).result
        return lambda: Computed(result())


class Cascade(Program):
    """Runs a tier by name, or under :data:`AUTO` the lean tier and, for the rows that it is unsure of, the full one."""

    def __init__(self, config: CascadeProgram, runners: Mapping[str, Runner]) -> None:
        self._config = config
        self._single = SingleRun(runners)
        self._lean, self._full = runners[config.lean], runners[config.full]

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Run one tier, or the cascade, whose repeats are its time in units of the lean tier's run."""
        if options.tier != AUTO:
            return self._single.compute(inputs, options)
        config = self._config
        begun = time.perf_counter()
        outputs = self._lean.infer(inputs)
        lean_seconds = time.perf_counter() - begun
        unsure = ~(margins(outputs[config.logits]) >= config.margin)  # also of a row without numbers
        tiers = np.where(unsure, config.full, config.lean)
        if not unsure.any():
            return Computed(outputs, {TIER: tiers})
        for name, array in self._full.infer({name: array[unsure] for name, array in inputs.items()}).items():
            outputs[name][unsure] = array
        return Computed(outputs, {TIER: tiers}, (time.perf_counter() - begun) / lean_seconds)

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed] | None:
        """Start one tier; a cascade decides between its runs, so it cannot be started."""
        return None if options.tier == AUTO else self._single.start(inputs, options)


def margins(logits: Array) -> Array:
    """Return how much more likely the best label is than the second best, [N], 0 to 1, for logits [N, labels].

    It is NaN where a logit is NaN, or the largest one infinite.
    """
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    two = np.sort(exponentials / exponentials.sum(axis=1, keepdims=True), axis=1)[:, -2:]
    difference: Array = two[:, 1] - two[:, 0]
    return difference


@dataclass(slots=True)
class HandedOut:
    """How much of a row's text earlier answers had. It outlives a session that fails: then the row begins anew."""

    characters: int = 0
    tokens: int = 0


class Joining(NamedTuple):
    """A request that joins a session: its key in the session, and the arguments of :meth:`Program.compute`.

    A session of texts adds to ``handed_out`` what each row has handed out, unless it is there already.
    """

    key: object
    inputs: Mapping[str, Array]
    options: Options
    handed_out: list[HandedOut] | None = None


class Finished(NamedTuple):
    """A request whose last row has ended, or that failed alone: its key, and its result so far."""

    key: object
    computed: Computed
    error: RunnerError | None = None  # of the first row that failed


class Session(Protocol):
    """The requests in progress on one runner. One thread uses it."""

    @property
    def rows(self) -> int:
        """The number of rows in progress."""

    def add(self, requests: Sequence[Joining]) -> list[Finished]:
        """Add the rows of all requests, whose inputs have equal shapes apart from the number of rows.

        Return those that have ended already. If this raises, as :meth:`edge.runner.Runner.infer` does, none is added.
        """

    def step(self) -> list[Finished]:
        """Compute one step of all rows, and return the requests that it finished; raise as :meth:`add`."""

    def partial(self, key: object, stopped: str = "") -> Computed | None:
        """Return the outputs so far of a request in progress, of texts only what is new; None before the first ones.

        With ``stopped``, the reason to report for the rows that have not ended, it returns what the end would.
        """

    def drop(self, key: object) -> None:
        """Drop the rows of a request, if it is in progress."""


def close_gaps(rows: list[T], leaving: Sequence[int]) -> list[tuple[int, int]]:
    """Remove the rows at some places, in ascending order, and move others from the end into the gaps.

    Return the moves, from the old place of a row to the new one, for :meth:`edge.runner.DeviceLoop.keep`.
    """
    left = len(rows) - len(leaving)
    staying = sorted({*range(left, len(rows))}.difference(leaving))
    moves = list(zip(staying, leaving, strict=False))  # as many rows stay at the end as there are gaps
    for source, target in moves:
        rows[target] = rows[source]
    del rows[left:]
    return moves


class IterativeProgram(Program):
    """A program of sessions, in which requests are batched continuously.

    ``limits`` are of requests that set none. ``generates`` says that rows are texts: the run in which a row joins and
    each step give it one token, and partial answers have new tokens only.
    """

    limits: LoopLimits
    loops_per_step = 1
    generates = False

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Compute one request in a session of its own, until the last of its rows has ended."""
        session = self.session(options)
        ended = session.add([Joining(None, inputs, options)])
        while not ended:
            ended = session.step()
        (finished,) = ended
        if finished.error:
            raise finished.error
        return finished.computed

    @abstractmethod
    def session(self, options: Options) -> Session:
        """Return a session without rows."""
