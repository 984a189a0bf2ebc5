"""Coverage of intervals, by simulation."""

import numpy as np
import pytest

from export.intervals import PairedRuns, average_difference


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
