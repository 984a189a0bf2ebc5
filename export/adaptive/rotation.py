"""Calibrated order of the coordinates of heads: the same outputs, and the first d' coordinates are the best d'.

At full rank, the factors of :mod:`export.reduce.algebra` are an exact change of basis. The new coordinates are
sorted by their contribution. Those of a head's output have mean zero, so that a dropped one is replaced by its mean.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch

from export.data.tokens import Batch
from export.finetune.objectives import Head
from export.models.attention import MultiHeadAttention
from export.reduce.algebra import blocks, fill, heads_of, joined, query_key_factors, value_output_factors
from export.reduce.calibration import AttentionStatistics, attention_statistics, check_calibration, check_original
from export.reduce.states import after_feed_forward, embedded, layers_of

HeadT = TypeVar("HeadT", bound=Head)


def rotated_model(model: HeadT, batches: Sequence[Batch]) -> HeadT:
    """Return a copy of a model with the same outputs and every head's coordinates in calibrated order.

    Args:
        model: in evaluation mode; it is not changed.

    Raises:
        ReductionError: the model is reduced already, or the calibration set is too small.
    """
    check_original(model)
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
    """Return an attention with the same outputs and the coordinates of each head in the order of its statistics."""
    heads, width = attention.num_heads, attention.head_dim
    new = copy.deepcopy(attention)
    W_Q, W_K = (heads_of(projection.weight, heads) for projection in (attention.q_proj, attention.k_proj))
    b_Q, b_V, b_O = (p.bias.detach().double() for p in (attention.q_proj, attention.v_proj, attention.output_proj))
    F, G, _ = query_key_factors(statistics.S_q, statistics.S_k, width)
    fill(new.q_proj, joined(W_Q @ F), (torch.unflatten(b_Q, 0, (heads, 1, width)) @ F).flatten())
    # b_K adds the same to all logits of a query.
    fill(new.k_proj, joined(W_K @ G), torch.zeros(heads * width))
    W_O = attention.output_proj.weight.detach().double().T  # [H * d_k, d]
    C = torch.unflatten(torch.unflatten(statistics.C, 0, (heads, width)), 2, (heads, width))
    own = torch.stack([C[head, :, head] for head in range(heads)])  # [H, d_k, d_k]
    E, W_small, _ = value_output_factors(own, torch.unflatten(W_O, 0, (heads, width)), width)
    B = blocks(E)
    # Rows of P sum to 1: subtracting a constant from the values subtracts it from the output.
    fill(new.v_proj, attention.v_proj.weight.detach().double().T @ B, -(statistics.m @ B))
    fill(new.output_proj, W_small.flatten(0, 1), b_O + (statistics.m + b_V) @ W_O)
    return new
