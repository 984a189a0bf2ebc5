"""Plans of a reduction: by the losses and times of options, and whole layers spread over the depth."""

import copy
from functools import partial
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from edge.bench.layer_latencies import LayerLatencies, Shape
from edge.errors import UsageError
from export.errors import PlanError
from export.models.transformer import Layer, LayerShape, TransformerConfig
from export.reduce.grid import Grid, Times, grid_of
from export.reduce.latency import machine_key, measure_layers, measure_times
from export.reduce.losses import Losses, LossMeter
from export.reduce.plan import amdahl_bound, check_speedup, macs_per_token, plan_of
from export.reduce.search import check_target, choose_shapes, least_loss
from export.reduce.spread import spread_shapes
from export.reduce.states import embedded
from export.training.points import Point, points_of
from tests.support.reduction_data import batches, config, mac_times, model

BERT = LayerShape(12, 64, 3072)


@pytest.mark.parametrize("shape", [LayerShape(3, 4, 48), LayerShape(0, 0, 8), LayerShape(2, 6, 0)])
def test_the_formula_counts_the_computed_multiplications(shape):
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        Layer(config(dim=24), shape).eval()(torch.randn(1, 7, 24), None)
    assert 7 * macs_per_token(24, shape, 7) == counter.get_total_flops() // 2


def test_half_of_everything_is_twice_as_fast():
    plan = plan_of(msgspec.structs.replace(config(), dim=768, layers=(BERT,) * 2), [LayerShape(6, 64, 1536)] * 2)
    assert plan.removed_share(384) == 0.5
    assert check_speedup(plan, 384, 1.99) == amdahl_bound(0.5) == 2.0
    assert check_speedup(plan, 384, 2.15) == 2.0  # within the tolerance
    assert check_speedup(plan_of(config(), [LayerShape(0, 0, 0)] * 2), 8, 1e6) == float("inf")


def test_speedups_above_the_bound_are_rejected():
    """Paper 002's figure: 1.76 times faster by fewer dimensions of queries and keys alone, here all of the logits."""
    plan = plan_of(msgspec.structs.replace(config(), dim=768, layers=(BERT,)), [LayerShape(9, 64, 3072)])
    with pytest.raises(PlanError, match=r"got 1.76, expected at most 1.096 \+ 10%, because 8.8% of the .* at 128"):
        check_speedup(plan, 128, 1.76)
    with pytest.raises(PlanError, match="got nan"):
        check_speedup(plan, 128, float("nan"))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (LayerShape(5, 8, 48), "layer 1 field num_heads: got 5, expected at most 4"),
        (LayerShape(4, 9, 48), "layer 1 field head_dim: got 9, expected at most 8"),
        (LayerShape(4, 8, 49), "layer 1 field ffn_dim: got 49, expected at most 48"),
    ],
)
def test_shapes_that_do_not_fit(shape, message):
    with pytest.raises(PlanError, match=message):
        plan_of(config(), [None, shape])


DENSE = LayerShape(4, 8, 48)
GRID = Grid(((4, 8), (2, 8), (2, 4), (0, 0)), (48, 24, 0))


@pytest.mark.parametrize("seed", range(4))
def test_least_loss_is_that_of_brute_force(seed):
    random = np.random.default_rng(seed)
    losses, times = random.random((4, 5)), random.integers(1, 9, size=5)
    for budget in (4 * times.min(), 2 * (times.min() + times.max()), 4 * times.max()):
        found = least_loss(losses, times, budget, bins=int(budget))
        every = {
            choice: sum(losses[layer, option] for layer, option in enumerate(choice))
            for choice in product(range(5), repeat=4)
            if sum(times[list(choice)]) <= budget
        }
        assert tuple(found) == min(every, key=every.__getitem__)


def test_the_fastest_plan_is_found_though_bins_are_too_wide_for_it():
    assert least_loss(np.zeros((3, 2)), np.array([1.0, 0.34]), 1.02, bins=10) is None


def test_options_of_bert_base():
    bert = msgspec.structs.replace(config(layers=1), layers=(LayerShape(12, 64, 3072),))
    grid = grid_of(bert)
    assert (grid.attention[:4], grid.attention[-1]) == (((12, 64), (12, 32), (12, 16), (10, 64)), (0, 0))
    assert (len(grid.attention), grid.feed_forward) == (19, tuple(range(3072, -1, -256)))
    assert grid_of(config()) == Grid(((4, 8), (3, 8), (2, 8), (1, 8), (0, 0)), (48, 0))


HALVES = [Losses([0, 1, 2, 9], [0, 1, 9]), Losses([0, 0.1, 0.2, 0.3], [0, 5, 9]), Losses([0, 5, 9, 9], [0, 0.1, 0.2])]


def test_target_within_reach_is_met():
    times = mac_times(config(layers=3), GRID, 8, rest=0.5)
    assert times.layers[0, 0] == pytest.approx(1)
    shapes = choose_shapes([DENSE] * 3, HALVES, times, 1.5)
    assert 1.5 <= times.of([DENSE] * 3) / times.of(shapes) < 2
    assert shapes[1].num_heads == 0  # where it costs least
    assert shapes[2].ffn_dim == 0
    assert choose_shapes([DENSE] * 3, HALVES, times, 0.99) == [DENSE] * 3


def test_a_whole_layer_goes_where_that_costs_less_than_its_halves():
    times = mac_times(config(layers=3), GRID, 8, rest=0.5)
    losses = [layer._replace(layer=loss) for layer, loss in zip(HALVES, (0.2, 8, 8), strict=True)]
    shapes = choose_shapes([DENSE] * 3, losses, times, 1.4)
    assert shapes == [None, DENSE, DENSE]
    assert times.of([DENSE] * 3) / times.of(shapes) == pytest.approx(1.4)  # a layer that is left out takes no time


def test_one_layer_stays_though_none_would_lose_least():
    times = mac_times(config(layers=3), GRID, 8, rest=0.5)
    losses = [Losses([0, 5, 5, 5], [0, 5, 5], layer) for layer in (0.1, 0.3, 0.2)]
    assert choose_shapes([DENSE] * 3, losses, times, 2) == [None, DENSE, None]


def test_structures_have_times_of_their_own():
    """Kernels go with a whole half: alone neither half pays, together they do, and no width of a head does."""
    layers = np.array([[1, 1, 0.9], [1, 1, 0.9], [1, 1, 0.9], [0.9, 0.9, 0.1]])
    times, losses = Times(GRID, layers, 0.0), [Losses([0, 1, 2, 3], [0, 1, 3], 9)] * 3
    assert choose_shapes([DENSE] * 3, losses, times, 1.3).count(LayerShape(0, 0, 0)) == 1
    # Between numbers of units of the grid the time is interpolated, but not down to none.
    assert times.of([LayerShape(4, 8, 1)]) == times.of([LayerShape(4, 8, 24)]) == 1.0


def test_points_are_weighted_by_their_shares_of_runs():
    short, long = (Times(GRID, np.full((4, 3), milliseconds), milliseconds / 2) for milliseconds in (1.0, 5.0))
    assert Times.mean([short, long], [3, 1]).of([DENSE] * 2) == pytest.approx(2.5 * (0.75 * 1 + 0.25 * 5))
    assert points_of("32:3,128", "1,8:0.5") == (
        Point(32, 1, 3.0),
        Point(32, 8, 1.5),
        Point(128, 1, 1.0),
        Point(128, 8, 0.5),
    )


@pytest.mark.parametrize("text", ["", "0", "32,", "32,32", "1.5", "32:0", "32:-1", "32:nan", "513", "32:inf"])
def test_sizes_that_are_none_are_rejected(text):
    with pytest.raises(
        UsageError, match=r"--tokens: got '.*', expected different whole numbers up to 512 .* 32:3,128:1"
    ):
        points_of(text, "1")
    with pytest.raises(UsageError, match=r"--batch: got '33', expected .* up to 32 .* 1:3,8:1"):
        points_of("1", "33")


def test_a_target_out_of_reach_is_rejected_with_the_fastest_plan():
    losses, times = [Losses([0] * 4, [0] * 3)] * 3, mac_times(config(layers=3), GRID, 8, rest=0.5)
    message = "target speed-up: got 8x, expected at most 6.60x, with 3 layers of 0 heads of 0 and 0 hidden units"
    with pytest.raises(PlanError, match=message):
        choose_shapes([DENSE] * 3, losses, times, 8)
    with pytest.raises(
        PlanError, match=r"at most 6\.86x, with 1 layer of 0 heads of 0 and 0 .*units, 2 layers left out"
    ):
        choose_shapes([DENSE] * 3, [one._replace(layer=1.0) for one in losses], times, 8)
    with pytest.raises(
        PlanError, match=r"speed-up on a board: got 8x, expected at most 6\.86x, with 1 layer of 0 heads"
    ):
        check_target([DENSE] * 3, times, 8, "target speed-up on a board")
    check_target([DENSE] * 3, times, 6.8)
    with pytest.raises(PlanError, match=r"target speed-up: got 1\.1x, expected at most 1\.00x"):  # it is there already
        check_target([LayerShape(0, 0, 0)], times, 1.1)


def divergence_without(classifier, data, number):
    """Return the mean divergence of a copy without a layer."""
    shorter = copy.deepcopy(classifier)
    del shorter.transformer.layers[number]
    with torch.no_grad():
        wanted, found = (torch.cat([one(*b[:3]).log_softmax(dim=-1) for b in data]) for one in (classifier, shorter))
    return float((wanted.exp() * (wanted - found)).sum(dim=1).mean())


def test_losses_are_those_of_the_model_with_that_layer_reduced():
    classifier, data = model(), batches()
    meter = LossMeter(classifier, data, embedded(classifier.transformer, data), GRID)
    first, second = meter.measure(0), meter.measure(1)
    for losses in (first, second):
        assert losses.attention[0] == losses.feed_forward[0] == 0
        assert 0 < losses.attention[1] < losses.attention[3]
        assert 0 < losses.feed_forward[1] < losses.feed_forward[2]
    assert first.layer == pytest.approx(divergence_without(classifier, data, 0), rel=1e-3)
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


WIDE, QUARTER = LayerShape(4, 32, 1024), LayerShape(1, 32, 256)
SETTINGS = TransformerConfig(architecture="bert", dim=256, layers=(WIDE,), vocab_size=9)


def test_smaller_layers_are_faster_and_kept_in_a_cache_of_this_machine(tmp_path):
    cache = tmp_path / "latency" / "table.json"
    seen = []
    options = {"cache": cache, "calls": 20, "on_shape": lambda *n: seen.append(n)}
    table = measure_layers(SETTINGS, [WIDE, QUARTER], [Point(64)], **options)
    assert seen == [(1, 2), (2, 2)]
    quarter = table.find(QUARTER, 64)
    assert quarter.calls == 20
    assert quarter.milliseconds < quarter.dense_milliseconds
    assert table.find(QUARTER, 17) is None
    assert measure_layers(SETTINGS, [QUARTER], [Point(64)], cache=cache) == table
    for broken in (LayerLatencies(key={**machine_key(SETTINGS), "device": "another"}), None):
        broken.write(cache) if broken else cache.write_text("{")
        table = measure_layers(SETTINGS, [QUARTER], [Point(8)], cache=cache, calls=3)
        assert ([timing.shape for timing in table.timings], LayerLatencies.read(cache)) == ([Shape.of(QUARTER)], table)


def test_times_add_up_to_those_of_a_model(tmp_path):
    once = partial(measure_times, model(), Grid(((4, 8), (0, 0)), (48,)), [Point(16, 8)], calls=10)
    (times,), (again,) = (once(cache=tmp_path / "latency.json") for _ in range(2))
    assert np.array_equal(times.layers, again.layers)  # from the cache
    assert times.rest == again.rest > 0
    assert times.layers[1, 0] < times.layers[0, 0]
    dense = LayerLatencies.read(tmp_path / "latency.json").find(LayerShape(4, 8, 48), 16, 8).dense_milliseconds
    assert times.layers[0, 0] == pytest.approx(dense, rel=0.3)


WHOLE = LayerShape(12, 32, 1536)
MINILM = TransformerConfig(architecture="bert", dim=384, layers=(WHOLE,) * 6, vocab_size=9)


def board_times(settings, layer=0.0455, width=1.875e-4, unit=2.916e-5, rest=0.0332):
    """Milliseconds as predicted on an Orin Nano Super at 15W, 32 tokens, by default for all-MiniLM-L6-v2."""
    grid = grid_of(settings)
    widths, units = (np.array(sizes) for sizes in ([h * r for h, r in grid.attention], grid.feed_forward))
    return Times(grid, layer + np.add.outer(width * widths, unit * units), rest)


def cut(units, *kept, heads=12):
    return [LayerShape(heads, 32, units) if number in kept else None for number in range(6)]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (1, cut(1536, *range(6))),
        (1.5, cut(1408, 0, 2, 3, 5)),
        (2, cut(1344, 0, 2, 5)),
        (3, cut(1152, 0, 5)),
        (4, cut(1536, 5)),
        (6, cut(1088, 5, heads=8)),
    ],
)
def test_whole_layers_stay_with_the_first_and_the_last_as_many_as_are_fast_enough(target, expected):
    times = board_times(MINILM)
    assert spread_shapes(MINILM, times, target) == expected
    assert times.speedup(MINILM.layers, expected) >= target


def test_one_layer_more_does_not_stay_if_it_costs_the_others_more_weights():
    """By the times predicted for all-mpnet-base-v2; nine layers of 2,304 units would be as fast, but smaller."""
    settings = TransformerConfig(architecture="bert", dim=768, layers=(LayerShape(12, 64, 3072),) * 12, vocab_size=9)
    found = spread_shapes(settings, board_times(settings, 0.0969, 1.163e-4, 5.608e-5, 0.0366), 1.5)
    assert [number for number, shape in enumerate(found) if shape] == [0, 2, 3, 5, 6, 8, 9, 11]
    assert {shape.ffn_dim for shape in found if shape} == {3008}


def test_a_speed_out_of_reach_is_rejected_with_the_fastest_plan():
    fastest = r"at most 10\.66x, with 5 layers left out, 1 layer of 2 heads of 32 and 128 hidden units"
    with pytest.raises(PlanError, match=f"speed-up on a board: got 99x, expected {fastest}"):
        spread_shapes(MINILM, board_times(MINILM), 99, "target speed-up on a board")


def test_layers_of_a_reduced_model_lose_nothing_that_they_do_not_have():
    layers = (LayerShape(0, 0, 512), WHOLE, LayerShape(4, 16, 100, 0.3), LayerShape(6, 32, 0))
    settings = TransformerConfig(architecture="bert", dim=384, layers=layers, vocab_size=9)
    times = mac_times(settings, grid_of(settings), 32)
    for target in (1.2, 2, 5, 9):
        shapes = spread_shapes(settings, times, target)
        assert times.speedup(layers, shapes) >= target
        for shape, layer in zip(shapes, layers, strict=True):
            if shape:
                assert (shape.head_dim, shape.scale) == (layer.head_dim, layer.scale)
                assert shape.num_heads <= layer.num_heads
                assert shape.ffn_dim <= layer.ffn_dim
