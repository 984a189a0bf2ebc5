"""Coverage of intervals, by simulation."""

import numpy as np
import pytest

from edge.bundles.manifest import Measure
from export.training.intervals import PairedRuns, across_seeds, average_difference, mean_measure, with_interval


@pytest.mark.parametrize(("item_noise", "seed_noise"), [(1.0, 0.02), (0.2, 0.1), (0.5, 0.05)])
def test_intervals_of_averages_over_tasks_and_few_seeds_cover_the_truth(item_noise, seed_noise):
    """With a true difference of 0, 95 % of the intervals should have it; resampling three seeds gives 72 to 86 %."""
    random, covered, simulations = np.random.default_rng(0), 0, 250
    items, tasks = 200, 4
    for _ in range(simulations):
        found = []
        for task in range(tasks):
            seeds = (3, 5)[task % 2]
            values = (
                random.normal(scale=item_noise, size=items)  # that all seeds share
                + random.normal(scale=item_noise, size=(seeds, items))
                + random.normal(scale=seed_noise, size=(seeds, 1))
            )
            shares = random.multinomial(items, [1 / items] * items, size=200) / items
            found.append(PairedRuns(values.mean(axis=1), shares @ values.mean(axis=0)))
        low, high = average_difference(found).interval
        covered += low <= 0 <= high
    assert 0.93 <= covered / simulations <= 0.995


def test_resamples_and_seeds_that_agree_leave_the_interval_over_items_or_none():
    one_cosine, right = mean_measure("cosine", "holdout", np.array([0.97])), mean_measure("right", "dev", np.ones(24))
    assert (one_cosine.value, one_cosine.interval, one_cosine.n) == (0.97, None, 1)
    assert with_interval(one_cosine.value, one_cosine.interval, str) == "0.97"
    wilson = (pytest.approx(24 / (24 + 1.96**2), rel=1e-4), 1)
    assert right.interval == wilson
    (pooled,) = across_seeds([(right,), (right,), (right,)])
    assert (pooled.value, pooled.seeds, pooled.interval) == (1, 3, wilson)
    (differing,) = across_seeds([(right,), (Measure("right", "dev", 0.5, 24),)])
    assert differing.interval[0] < 0.5
