"""Heads whose coordinates are in calibrated order: the same outputs, and the first d' coordinates are the best d'.

The factors of :mod:`export.reduction.lowrank` at full rank are an exact change of basis. In it coordinates are sorted
by what they contribute, and those of a head's output have mean zero, so that to leave one out puts its mean there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from export.attention import MultiHeadAttention
from export.reduction.calibration import AttentionStatistics, attention_statistics, check_calibration
from export.reduction.lowrank import blocks, heads_of, query_key_factors, value_output_factors
from export.reduction.reduce import check_model
from export.reduction.states import after_feed_forward, embedded, layers_of
from export.tasks.objectives import Head
from export.tasks.tokens import Batch

HeadT = TypeVar("HeadT", bound=Head)


def rotated_model(model: HeadT, batches: Sequence[Batch]) -> HeadT:
    """Return a copy of a model that answers the same, with every head's coordinates in calibrated order.

    Args:
        model: in evaluation mode; it is left alone.

    Raises:
        ReductionError: the model is reduced already, or the calibration set is too small.
    """
    check_model(model)
    check_calibration(model.transformer, batches)
    rotated = copy.deepcopy(model)
    states = embedded(model.transformer, batches)
    for original, layer in zip(layers_of(model.transformer), layers_of(rotated.transformer), strict=True):
        statistics, after = attention_statistics(original, states, batches)
        assert original.attention is not None
        layer.attention = rotated_attention(original.attention, statistics)
        states = after_feed_forward(original, after)
    return rotated


def rotated_attention(attention: MultiHeadAttention, statistics: AttentionStatistics) -> MultiHeadAttention:
    """Return an attention with the same outputs; its statistics decide the order of each head's coordinates."""
    heads, width = attention.num_heads, attention.head_dim
    new = copy.deepcopy(attention)
    W_Q, W_K = (heads_of(projection.weight, heads) for projection in (attention.q_proj, attention.k_proj))
    b_Q, b_V, b_O = (p.bias.detach().double() for p in (attention.q_proj, attention.v_proj, attention.output_proj))
    F, G, _ = query_key_factors(statistics.S_q, statistics.S_k, width)
    _fill(new.q_proj, _joined(W_Q @ F), (torch.unflatten(b_Q, 0, (heads, 1, width)) @ F).flatten())
    # b_K adds the same to all logits of a query.
    _fill(new.k_proj, _joined(W_K @ G), torch.zeros(heads * width))
    W_O = attention.output_proj.weight.detach().double().T  # [H * d_k, d]
    C = torch.unflatten(torch.unflatten(statistics.C, 0, (heads, width)), 2, (heads, width))
    own = torch.stack([C[head, :, head] for head in range(heads)])  # [H, d_k, d_k]
    E, W_small, _ = value_output_factors(own, torch.unflatten(W_O, 0, (heads, width)), width)
    B = blocks(E)
    # Rows of P sum to 1: subtracting a constant from the values subtracts it from the output.
    _fill(new.v_proj, attention.v_proj.weight.detach().double().T @ B, -(statistics.m @ B))
    _fill(new.output_proj, W_small.flatten(0, 1), b_O + (statistics.m + b_V) @ W_O)
    return new


def _joined(W: Tensor) -> Tensor:
    # [H, d, d_k] -> [d, H * d_k]
    return W.transpose(0, 1).flatten(1)


def _fill(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Give a layer x W + b its weights, W [in, out]."""
    with torch.no_grad():
        linear.weight.copy_(weight.T)
        linear.bias.copy_(bias)
