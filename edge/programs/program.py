"""The contract of every program: inputs and options in, outputs and facts about each row out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from edge.datatypes import Array
from edge.runner import Runner

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


class Program(Protocol):
    """Computes the requests of one model.

    It runs on the device's thread, or on several threads at once where the device is the CPU.
    """

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Run the model once for one request, or for several that were joined.

        Raises:
            RequestError: as :meth:`edge.runner.Runner.infer`.
        """
        ...


class SingleRun:
    """Runs one tier once: the program of every bundle that names no other.

    Args:
        runners: of the tiers, by name.
    """

    def __init__(self, runners: Mapping[str, Runner]) -> None:
        self._infer = {tier: runner.infer for tier, runner in runners.items()}

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Run the tier that the options name."""
        return Computed(self._infer[options.tier](inputs))
