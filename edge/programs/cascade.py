"""Cascade: the lean tier answers first, and the full tier recomputes the rows that the lean one is unsure of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from edge.bundles.programs import CascadeProgram
from edge.datatypes import Array
from edge.programs.program import TIER, Computed, Options, Program, SingleRun
from edge.runner import Runner

#: Stands for a tier, and leaves the choice among them to the program.
AUTO: Final = "auto"


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
