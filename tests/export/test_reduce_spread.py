"""Whole layers, spread over the depth: the plan of a reduction that is trained afterwards."""

import numpy as np
import pytest

from export.errors import PlanError
from export.models.transformer import LayerShape, TransformerConfig
from export.reduce.grid import Times, grid_of
from export.reduce.spread import spread_shapes
from tests.support.reduction_data import mac_times

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
