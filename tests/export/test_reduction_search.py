from itertools import product

import numpy as np
import pytest
import torch

from export.errors import PlanError
from export.reduction.search import Costs, Grid, LossMeter, choose_shapes, grid_of, least_loss
from export.reduction.states import embedded
from export.transformer import LayerShape
from tests.support.reduction_data import batches, config, mac_times, model

DENSE = LayerShape(4, 8, 48)
GRID = Grid(((4, 8), (2, 8), (2, 4), (0, 0)), (48, 24, 0))


@pytest.mark.parametrize("seed", range(8))
def test_least_loss_is_that_of_brute_force(seed):
    random = np.random.default_rng(seed)
    losses, times = random.random((4, 5)), random.integers(1, 9, size=5)
    for budget in (4 * times.min(), 14, 20, 4 * times.max()):
        if budget < 4 * times.min():
            continue
        found = least_loss(losses, times, budget, bins=int(budget))
        every = {
            choice: sum(losses[layer, option] for layer, option in enumerate(choice))
            for choice in product(range(5), repeat=4)
            if sum(times[list(choice)]) <= budget
        }
        assert tuple(found) == min(every, key=every.__getitem__)


def test_the_fastest_plan_is_found_though_bins_are_too_wide_for_it():
    assert least_loss(np.zeros((3, 2)), np.array([1.0, 0.34]), 1.02, bins=10) == [1, 1, 1]


def test_options_of_bert_base():
    grid = grid_of(LayerShape(12, 64, 3072))
    assert grid.attention[:4] == ((12, 64), (12, 32), (12, 16), (10, 64))
    assert grid.attention[-1] == (0, 0)
    assert len(grid.attention) == 19
    assert grid.feed_forward == tuple(range(3072, -1, -256))
    assert grid_of(DENSE) == Grid(((4, 8), (3, 8), (2, 8), (1, 8), (0, 0)), (48, 0))


def test_target_within_reach_is_met():
    settings = config(layers=3)
    losses = [Costs([0, 1, 2, 9], [0, 1, 9]), Costs([0, 0.1, 0.2, 0.3], [0, 5, 9]), Costs([0, 5, 9, 9], [0, 0.1, 0.2])]
    times = mac_times(settings, GRID, 8)
    assert times.attention[0] + times.feed_forward[0] == pytest.approx(1)
    shapes, speedup = choose_shapes(DENSE, GRID, losses, times, 0.5, 1.5)
    assert 1.5 <= speedup < 2
    assert shapes[1].num_heads == 0  # where it costs least
    assert shapes[2].ffn_dim == 0
    assert choose_shapes(DENSE, GRID, losses, times, 0.5, 0.99) == ([DENSE] * 3, 1.0)


def test_a_target_out_of_reach_is_rejected_with_the_fastest_plan():
    losses = [Costs([0] * 4, [0] * 3)] * 3
    message = "target speed-up: got 8x, expected at most 6.60x, with 3 layers of 0 heads of 0 and 0 hidden units"
    with pytest.raises(PlanError, match=message):
        choose_shapes(DENSE, GRID, losses, mac_times(config(layers=3), GRID, 8), 0.5, 8)


def test_losses_are_those_of_the_model_with_that_layer_reduced():
    classifier, data = model(), batches()
    meter = LossMeter(classifier, data, embedded(classifier.transformer, data), GRID)
    first, second = meter.measure(0), meter.measure(1)
    for losses in (first, second):
        assert losses.attention[0] == losses.feed_forward[0] == 0
        assert 0 < losses.attention[1] < losses.attention[3]
        assert 0 < losses.feed_forward[1] < losses.feed_forward[2]
    again = LossMeter(classifier, data, embedded(classifier.transformer, data), GRID)
    again.skip(0)
    assert again.measure(1) == second
    # Without hidden units, the second layer adds a constant: try it on the model itself.
    layer = classifier.transformer.layers[1]
    mask = torch.cat([batch.mask.flatten() for batch in data]).bool()
    with torch.no_grad():
        wanted = [classifier(*batch[:3]).log_softmax(dim=-1) for batch in data]
        outputs = []
        handle = layer.feed_forward.register_forward_hook(lambda _, read, output: outputs.append(output.flatten(0, 1)))
        _ = [classifier(*batch[:3]) for batch in data]
        handle.remove()
        mean = torch.cat(outputs)[mask].mean(dim=0)
        handle = layer.feed_forward.register_forward_hook(lambda _, read, output: mean.expand_as(output))
        found = [classifier(*batch[:3]).log_softmax(dim=-1) for batch in data]
        handle.remove()
    wanted, found = torch.cat(wanted), torch.cat(found)
    divergence = (wanted.exp() * (wanted - found)).sum(dim=1).mean()
    assert second.feed_forward[2] == pytest.approx(float(divergence), rel=1e-3)
