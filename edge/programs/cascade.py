"""The cascade: the lean tier answers first, and the full tier answers again where the lean one was not sure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from edge.bundles.manifest import CascadeProgram
from edge.datatypes import Array
from edge.programs.program import TIER, Computed, Options, Program, SingleRun
from edge.runner import Runner

#: The tier that a request names to leave the choice to the program.
AUTO: Final = "auto"


class Cascade(Program):
    """Runs a tier by name, or under :data:`AUTO` the lean tier and, for the rows that it is not sure of, the full one.

    Args:
        config: the tiers, the output that gives the lean one's confidence, and the margin below which it is too low.
        runners: of the tiers, by name.
    """

    def __init__(self, config: CascadeProgram, runners: Mapping[str, Runner]) -> None:
        self._config = config
        self._single = SingleRun(runners)
        self._lean = runners[config.lean]
        self._full = runners[config.full]

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Run the tier that the options name, or the cascade.

        A cascade counts its repeats in runs of the lean tier: one that the full tier made three times as long has 3.
        """
        if options.tier != AUTO:
            return self._single.compute(inputs, options)
        config = self._config
        begun = time.perf_counter()
        outputs = self._lean.infer(inputs)
        lean_seconds = time.perf_counter() - begun
        unsure = margins(outputs[config.logits]) < config.margin
        tiers = np.where(unsure, config.full, config.lean)
        if not unsure.any():
            return Computed(outputs, {TIER: tiers})
        second = self._full.infer({name: array[unsure] for name, array in inputs.items()})
        repeats = (time.perf_counter() - begun) / lean_seconds
        if unsure.all():
            return Computed(second, {TIER: tiers}, repeats)
        merged = {name: array.copy() for name, array in outputs.items()}
        for name, array in merged.items():
            array[unsure] = second[name]
        return Computed(merged, {TIER: tiers}, repeats)

    def start(self, inputs: Mapping[str, Array], options: Options) -> Callable[[], Computed] | None:
        """Start the tier that the options name; a cascade decides between its runs, so it cannot be started."""
        return None if options.tier == AUTO else self._single.start(inputs, options)


def margins(logits: Array) -> Array:
    """Return how much more likely the first label is than the second, [N] from 0 to 1, for logits [N, labels]."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    two = np.sort(exponentials / exponentials.sum(axis=1, keepdims=True), axis=1)[:, -2:]
    difference: Array = two[:, 1] - two[:, 0]
    return difference
