"""Interface of a program, which computes a request with one or several runners, and the program of a single run."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from edge.datatypes import Array
from edge.programs.sampling import Sampling
from edge.runner import OverlappingRunner, Runner

#: Facts of a row: the tier that answered it, and the number of tokens of its text.
TIER: Final = "tier"
TOKENS: Final = "tokens"


class LoopLimits(NamedTuple):
    """When a row ends: after ``max_loops``, or when its residual is at most ``tolerance``, which is 0 for texts."""

    max_loops: int
    tolerance: float


class Mover(Protocol):
    """A head, which moves logits; see :class:`edge.programs.head.Head`."""

    def move(self, logits: Array, alpha: Array) -> Array:
        """Return new logits [N, vocabulary] for logits of that shape and alphas [N, 1]."""


class AppliedHead(NamedTuple):
    """A head, and how much it moves the logits."""

    head: Mover
    alpha: float


class Options(NamedTuple):
    """How to compute one request. Requests share a run only if they are for the same tier."""

    tier: str  # its name, or that of the program's own choice of tiers
    limits: LoopLimits | None = None  # of a loop, or the tokens of a text; None takes the manifest's
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
    """Computes the requests of one model, on the device's thread, or on several threads at once on the CPU.

    Attributes:
        growing: outputs, texts [rows, 1], that only get longer from one partial answer to the next.
        per_token: outputs [rows, tokens] of which the same is true, and what is behind the last token of a row, whose
            number is the fact ``tokens``.
    """

    growing: tuple[str, ...] = ()
    per_token: Mapping[str, float] = MappingProxyType({})

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
        """Start a run on a device that computes by itself, so that the caller can prepare the next one meanwhile.

        Return a function that waits for the result, to be called in the order of the starts; None if the run can only
        be computed. Both raise as :meth:`compute`.
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
        """Run the tier; see :meth:`Program.compute`."""
        return Computed(self._runners[options.tier].infer(inputs))

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed] | None:
        """Start the tier; see :meth:`Program.start`."""
        if not (start := self._start.get(options.tier)):
            return None
        result = start(inputs).result
        return lambda: Computed(result())
