"""Calibration: means and covariances of the activations in a layer, in float64.

Only tokens count, never padding. A batch is added to the sums and dropped, so that memory depends on the widths alone.
Letters are those of the papers: H heads of width d_k, f hidden units, S for queries and keys, C for the heads' outputs
o, A for the activations of hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge.errors import Raw
from export.data.tokens import Batch, Rows, sorted_batches
from export.errors import ReductionError
from export.models.heads import Head
from export.models.recorded import recorded
from export.models.transformer import Layer, Transformer
from export.reduce.states import tokens_of

BATCH = 32
_FIX = "Check the weights, and the inputs of the calibration set."


class Moments:
    """Mean and second moment of vectors that consist of G ``groups`` of ``width`` w, for each group."""

    def __init__(self, groups: int, width: int) -> None:
        self.count = 0
        self._width = width
        self._sum = torch.zeros(groups, width, dtype=torch.float64)
        self._products = torch.zeros(groups, width, width, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Add vectors [n, G * w], of any type and device."""
        vectors = torch.unflatten(rows.detach().to("cpu", torch.float64), -1, (-1, self._width))
        groups = vectors.transpose(0, 1)  # [G, n, w]
        self.count += groups.shape[1]
        self._sum += groups.sum(dim=1)
        self._products += groups.transpose(1, 2) @ groups

    @property
    def mean(self) -> Tensor:
        """Return E[x], [G, w]."""
        return self._sum / self.count

    @property
    def second_moment(self) -> Tensor:
        """Return E[x xᵀ], [G, w, w]."""
        return self._products / self.count

    @property
    def covariance(self) -> Tensor:
        """Return E[x xᵀ] - E[x] E[x]ᵀ, [G, w, w]."""
        return self.second_moment - self.mean[:, :, None] * self.mean[:, None, :]


class AttentionStatistics(NamedTuple):
    """Statistics of one attention sub-layer, float64.

    Attributes:
        S_q: E[q qᵀ], [H, d_k, d_k], with the queries' bias.
        S_k: covariance of the keys, [H, d_k, d_k]; their mean adds the same to all logits of a query.
        C: covariance of the outputs of all heads together, before W_O and without b_V, [H * d_k, H * d_k].
        m: their mean, [H * d_k].
    """

    S_q: Tensor
    S_k: Tensor
    C: Tensor
    m: Tensor


class Features(NamedTuple):
    """Covariance [w, w] and mean [w] of the inputs of a last projection, float64, such as the hidden units' A."""

    covariance: Tensor
    mean: Tensor


def check_calibration(transformer: Transformer, batches: Sequence[Batch]) -> None:
    """Check that there are more tokens than features in the widest layer.

    Raises:
        ReductionError: there are too few, or a batch belongs to another kind of model.
    """
    tokens = 0
    for number, batch in enumerate(batches):
        images, pixels = transformer.config.architecture == "vit", batch.inputs.dim() == 4
        if images != pixels:
            given = Raw(f"inputs of shape {list(batch.inputs.shape)}")
            expected = "pixels [N, channels, size, size]" if images else "token ids [N, T]"
            raise ReductionError(
                f"calibration batch {number}", given=given, expected=expected, fix="Give its own data."
            )
        tokens += _token_count(transformer, batch)
    widest = max((max(s.num_heads * s.head_dim, s.ffn_dim) for s in transformer.config.layers), default=0)
    if tokens <= widest:
        inputs = sum(len(batch.inputs) for batch in batches)
        given = Raw(f"{tokens} tokens without padding in {inputs} inputs")
        expected = f"more than {widest}, the widest layer's features"
        needed = inputs * (widest + 1) // max(tokens, 1) + 1
        fix = f"Give more training examples, or more of them with --calibration: of this length, {needed} at least."
        raise ReductionError("calibration set", given=given, expected=expected, fix=fix)


def attention_statistics(
    layer: Layer, states: Sequence[Tensor], batches: Sequence[Batch]
) -> tuple[AttentionStatistics, list[Tensor]]:
    """Run a layer's attention over calibration inputs.

    Returns:
        The statistics, and the output of the layer's first half for each batch.

    Raises:
        ReductionError: an activation is not finite.
    """
    attention = layer.attention
    assert attention is not None, "a layer without heads has no statistics"
    heads, width = attention.num_heads, attention.head_dim
    q, k, o = Moments(heads, width), Moments(heads, width), Moments(1, heads * width)
    bias = attention.v_proj.bias.detach()
    after = []
    for x, batch in zip(states, batches, strict=True):
        with torch.no_grad(), recorded([attention.q_proj, attention.k_proj, attention.output_proj]) as found:
            after.append(layer.after_attention(x, batch.mask))
        q.add(tokens_of(found[attention.q_proj].returned, batch.mask))
        k.add(tokens_of(found[attention.k_proj].returned, batch.mask))
        # Rows of P sum to 1, so that the heads' outputs hold b_V as it is.
        o.add(tokens_of(found[attention.output_proj].read, batch.mask) - bias)
    statistics = AttentionStatistics(q.second_moment, k.covariance, o.covariance[0], o.mean[0])
    check_finite(statistics, _FIX)
    return statistics, after


def feed_forward_statistics(layer: Layer, states: Sequence[Tensor], batches: Sequence[Batch]) -> Features:
    """Run a layer's feed-forward over the states after its attention.

    Raises:
        ReductionError: an activation is not finite.
    """
    feed_forward = layer.feed_forward
    assert feed_forward is not None, "a layer without hidden units has no statistics"
    a = Moments(1, feed_forward.down.in_features)
    for x, batch in zip(states, batches, strict=True):
        with torch.no_grad(), recorded([feed_forward.down]) as found:
            layer.after_feed_forward(x)
        a.add(tokens_of(found[feed_forward.down].read, batch.mask))
    statistics = Features(a.covariance[0], a.mean[0])
    check_finite(statistics, _FIX)
    return statistics


def _token_count(transformer: Transformer, batch: Batch) -> int:
    if batch.mask is not None:
        return int(batch.mask.sum())
    config = transformer.config
    images = config.architecture == "vit"
    return len(batch.inputs) * ((config.image_size // config.patch_size) ** 2 + 1 if images else batch.inputs.shape[1])


def check_finite(statistics: AttentionStatistics | Features, fix: str) -> None:
    """Check that no activation was infinite or none; raise a ReductionError with this fix."""
    for name, value in statistics._asdict().items():
        if not torch.isfinite(value).all():
            subject = f"activations, by their {name}"
            raise ReductionError(subject, given=Raw("NaN or Inf"), expected="finite numbers", fix=fix)


def check_weights(model: Head) -> None:
    """Check that all weights are finite; raise a ReductionError that names the first that is not."""
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            given, fix = Raw("NaN or Inf"), "Train the model again."
            raise ReductionError(f"weights {name}", given=given, expected="finite numbers", fix=fix)


def check_original(model: Head) -> None:
    """Check that the weights of a model are finite, and that it is not reduced.

    Raises:
        ReductionError: a weight is not finite, or the layers are not all of one shape, with heads and hidden units.
    """
    check_weights(model)
    shapes = model.transformer.config.layers
    if len(set(shapes)) != 1 or not shapes[0].num_heads or not shapes[0].ffn_dim:
        given = Raw(f"{len(shapes)} layers of {len(set(shapes))} shapes")
        fix = "Start from the original model, not from a reduced one."
        raise ReductionError("model", given=given, expected="layers of one shape, with heads and units", fix=fix)


def calibration_batches(model: Head, calibration: Rows, share: float = 1.0) -> list[Batch]:
    """Return calibration inputs in batches.

    Args:
        share: of the inputs; they have the same spread of lengths as all.

    Raises:
        ReductionError: there are too few tokens for this model.
    """
    rows = np.concatenate(sorted_batches(calibration.lengths, BATCH))  # longest first
    rows = rows[np.linspace(0, len(rows) - 1, math.ceil(share * len(rows))).astype(int)]
    batches = [calibration.batch(rows[first : first + BATCH]) for first in range(0, len(rows), BATCH)]
    check_calibration(model.transformer, batches)
    return batches
