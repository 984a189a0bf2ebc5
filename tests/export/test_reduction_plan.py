import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from export.errors import PlanError
from export.reduction.plan import amdahl_bound, check_plan, check_speedup, macs_per_token, plan_of
from export.transformer import Layer, LayerShape
from tests.support.reduction_data import config

BERT = LayerShape(12, 64, 3072)


def counted_macs(shape, tokens):
    """Multiplications of the matrix products that a layer really does."""
    layer = Layer(config(dim=24), shape).eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        layer(torch.randn(1, tokens, 24), None)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    "shape", [LayerShape(4, 8, 48), LayerShape(3, 4, 48), LayerShape(0, 0, 8), LayerShape(2, 6, 0)]
)
@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_the_formula_counts_the_computed_multiplications(shape, tokens):
    assert tokens * macs_per_token(24, shape, tokens) == counted_macs(shape, tokens)


def test_half_of_everything_is_twice_as_fast():
    settings = msgspec.structs.replace(config(), dim=768, layers=(BERT,) * 2)
    plan = plan_of(settings, [LayerShape(6, 64, 1536)] * 2)
    assert plan.removed_share(384) == 0.5
    assert check_speedup(plan, 384, 1.99) == amdahl_bound(0.5) == 2.0
    assert check_speedup(plan, 384, 2.15) == 2.0  # within the tolerance


def test_speedups_above_the_bound_are_rejected():
    """Paper 002's figure: 1.76 times faster by fewer dimensions of queries and keys alone, here all of the logits."""
    settings = msgspec.structs.replace(config(), dim=768, layers=(BERT,))
    plan = plan_of(settings, [LayerShape(9, 64, 3072)])
    message = (
        r"speed-up: got 1.76, expected at most 1.096 \+ 10%, because 8.8% of the multiplications were removed at 128"
    )
    with pytest.raises(PlanError, match=message):
        check_speedup(plan, 128, 1.76)
    with pytest.raises(PlanError, match="got nan"):
        check_speedup(plan, 128, float("nan"))


def test_without_layers_the_bound_is_infinite():
    plan = plan_of(config(), [LayerShape(0, 0, 0)] * 2)
    assert check_speedup(plan, 8, 1e6) == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 99}, "the plan of another model"),
        ({"layers": ()}, "got 0 layers, expected 2 layers"),
        ({"shape": LayerShape(5, 8, 48)}, "layer 0 field num_heads: got 5, expected 0 to 4"),
        ({"shape": LayerShape(4, 0, 48)}, "layer 0 field head_dim: got 0, expected 1 to 8"),
        ({"shape": LayerShape(4, 8, 49)}, "layer 0 field ffn_dim: got 49, expected 0 to 48"),
        ({"heads": (0, 1, 2)}, r"layer 0 field heads: got \(0, 1, 2\), expected 4 distinct numbers below 4"),
        ({"heads": (0, 1, 2, 4)}, "layer 0 field heads"),
        ({"heads": (1, 0, 2, 3)}, "layer 0 field heads"),
        ({"neurons": (0,) * 48}, "layer 0 field neurons"),
    ],
)
def test_plans_that_do_not_fit(change, message):
    plan = plan_of(config(), config().layers)
    if change.keys() & {"shape", "heads", "neurons"}:
        change = {"layers": (msgspec.structs.replace(plan.layers[0], **change), plan.layers[1])}
    with pytest.raises(PlanError, match=message):
        check_plan(msgspec.structs.replace(plan, **change), config(), "plan")
