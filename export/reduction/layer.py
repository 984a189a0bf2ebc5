"""One layer, reduced as its plan says, and how well it does."""

from __future__ import annotations

import msgspec
from torch import Tensor

from export.reduction.calibration import attention_statistics, feed_forward_statistics
from export.reduction.plan import LayerPlan
from export.reduction.states import after_attention, relative_error
from export.reduction.sublayers import (
    AttentionReducer,
    FeedForwardReducer,
    Method,
    with_attention,
    with_feed_forward,
)
from export.tasks.tokens import Batch
from export.transformer import Layer


class LayerReport(msgspec.Struct, frozen=True):
    """Result of reducing a layer. Errors are mean squares over the variance of what they are errors of.

    Attributes:
        plan: its shape, and the heads and hidden units that stay.
        logits_error: of attention logits, from the new width of heads; predicted.
        attention_error: of the attention's output, from fewer heads and smaller values; predicted.
        measured_attention_error: of the attention's output, all told, on the calibration inputs.
        feed_forward_error: of the feed-forward's output; predicted.
        measured_feed_forward_error: the same, on the calibration inputs.
    """

    plan: LayerPlan
    logits_error: float
    attention_error: float
    measured_attention_error: float
    feed_forward_error: float
    measured_feed_forward_error: float


def reduced_layer(
    layer: Layer, plan: LayerPlan, states: list[Tensor], batches: list[Batch], method: Method
) -> tuple[Layer, list[Tensor], LayerReport]:
    """Reduce a layer: first its attention, then its feed-forward for what the new attention gives it to read.

    Args:
        layer: the original, with heads and hidden units; it is left alone.
        plan: its shape; heads and hidden units that it leaves open are chosen here.
        states: what the layer reads, [N, T, d] for each batch.

    Returns:
        The new layer, what its first half makes of the states, and the report.

    Raises:
        ReductionError: an activation is not finite.
    """
    shape = plan.shape
    assert layer.attention is not None
    assert layer.feed_forward is not None
    statistics, _ = attention_statistics(layer, states, batches)
    attention_reducer = AttentionReducer(layer.attention, statistics, method)
    if plan.heads is None:
        attention = attention_reducer.reduced(shape.num_heads, shape.head_dim, shape.scale)
    else:
        attention = attention_reducer.with_heads(plan.heads, shape.head_dim, shape.scale)
    halved = with_attention(layer, attention)
    halfway = after_attention(halved, states, batches)
    reducer = FeedForwardReducer(layer.feed_forward, feed_forward_statistics(halved, halfway, batches))
    feed_forward = reducer.reduced(shape.ffn_dim) if plan.neurons is None else reducer.with_neurons(plan.neurons)
    new = with_feed_forward(halved, feed_forward)
    report = LayerReport(
        LayerPlan(shape, attention.heads, feed_forward.neurons),
        attention.logits_error,
        attention.output_error,
        relative_error(layer, new, "attention", states, batches),
        feed_forward.output_error,
        relative_error(layer, new, "feed_forward", halfway, batches),
    )
    return new, halfway, report
