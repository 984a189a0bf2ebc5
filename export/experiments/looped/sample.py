"""Errors of several runs on the same prompts, and their means in resamples of prompts and runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array
from export.papers.looped.results import Curve
from export.training.intervals import RESAMPLES, item_shares


class Sample:
    """Errors of runs that differ in their seed.

    Two samples have the same prompts in the same resample, so that their differences and ratios are paired.

    Args:
        errors: of each run, [N, m] each: for N prompts, after each of m numbers of pairs or loops.
        normaliser: by which errors are divided.
        kind: runs of different kinds are resampled apart, because equal seeds do not make them pairs.

    Attributes:
        errors: divided by the normaliser, [S, N, m].
        drawn: their mean in each resample, [resamples, m].
    """

    def __init__(self, errors: Sequence[Array], normaliser: float, kind: int) -> None:
        self.errors = np.stack([np.asarray(array, np.float64) for array in errors]) / normaliser
        seeds, items, _ = self.errors.shape
        shares = np.random.default_rng(kind).multinomial(seeds, [1 / seeds] * seeds, size=RESAMPLES) / seeds
        means = np.stack([item_shares(items) @ of_run for of_run in self.errors], axis=1)  # [resamples, S, m]
        self.drawn = (means * shares[..., None]).sum(axis=1)

    @property
    def mean(self) -> Array:
        """The mean over runs and prompts, [m]."""
        mean: Array = self.errors.mean(axis=(0, 1))
        return mean

    def curve(self, name: str, x: Sequence[int]) -> Curve:
        """Return the mean after each of m numbers, with its 5th and 95th percentile."""
        low, high = np.percentile(self.drawn, [5, 95], axis=0)
        return Curve(name, tuple(map(int, x)), *(tuple(map(float, values)) for values in (self.mean, low, high)))
