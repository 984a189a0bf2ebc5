"""The contract of every program: inputs and options in, outputs and facts about each row out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from edge.datatypes import Array
from edge.runner import OverlappingRunner, Runner

#: The fact that names the tier that answered a row.
TIER: Final = "tier"
_NO_FACTS: Final[Mapping[str, Array]] = MappingProxyType({})


class Options(NamedTuple):
    """How one request is to be computed. Requests share a run only where their options are equal.

    Attributes:
        tier: the name of a tier, or of the program's own choice among them.
    """

    tier: str


class Computed(NamedTuple):
    """The result of one run.

    Attributes:
        outputs: of the graph, rows first where the model has a batch dimension.
        facts: what happened to each row, [rows] each, such as the tier that answered it.
        repeats: how often the program repeated its basic step, 1 or more; the time of a run is proportional to it.
    """

    outputs: dict[str, Array]
    facts: Mapping[str, Array] = _NO_FACTS
    repeats: float = 1.0


class Program(ABC):
    """Computes the requests of one model.

    It runs on the device's thread, or on several threads at once where the device is the CPU.
    """

    @abstractmethod
    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Run the model once for one request, or for several that were joined.

        Raises:
            RequestError: as :meth:`edge.runner.Runner.infer`.
        """

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed] | None:
        """Start a run on a device that computes it by itself, so that the caller can prepare the next one meanwhile.

        Returns:
            A function that waits for the result of the run, to be called in the order of the starts; None where only
            :meth:`compute` will do.

        Raises:
            RequestError: as :meth:`compute`, as does the function.
        """
        return None


class SingleRun(Program):
    """Runs one tier once: the program of every bundle that names no other.

    Args:
        runners: of the tiers, by name.
    """

    def __init__(self, runners: Mapping[str, Runner]) -> None:
        self._infer = {tier: runner.infer for tier, runner in runners.items()}
        self._start = {tier: runner.start for tier, runner in runners.items() if isinstance(runner, OverlappingRunner)}

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Run the tier that the options name."""
        return Computed(self._infer[options.tier](inputs))

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed] | None:
        """Start the tier that the options name; see :meth:`Program.start`."""
        start = self._start.get(options.tier)
        if not start:
            return None
        result = start(inputs).result
        return lambda: Computed(result())
