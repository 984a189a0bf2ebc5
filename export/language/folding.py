"""Backward attention for inference: the embeddings are frozen, so that keys and values are constants.

A layer becomes two thin products, whatever its normalisation, latent projection and gate are:

    z' = z + α Σ_g softmax(z / τ_g) U_g F_g

U is the layer's values, and F = α W_Q Kᵀ / √d_h with the learnt α. The α of a request is 1 for the head as it was
trained, and 0 for the language model alone. Heads of equal temperature share their probabilities and so form one group.
Keys are stored as [d, V]: the groups are then stacked without a copy, and one product has their sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from edge.errors import UsageError
from export.papers.backward.head import BackwardHead, split_heads


class Folded(NamedTuple):
    """The constants of one layer, FP32.

    Attributes:
        keys: F, [G, d_g, V].
        values: U, [G, V, d_g].
        temperatures: τ, [G]. They divide the logits.
    """

    keys: Array
    values: Array
    temperatures: Array


@torch.no_grad()
def fold(head: BackwardHead) -> tuple[Folded, ...]:
    """Return the constants of each layer.

    Groups of fewer heads than others are filled up with zeros.

    Raises:
        UsageError: the head has the literal form, which returns a distribution and not logits.
    """
    if head.config.form == "literal":
        fix = "Serve a head of the form residual."
        raise UsageError("form of a backward head", given="literal", expected="residual", fix=fix)
    folded = []
    for layer, (keys, values) in zip(head.attentions, head.keys_and_values(), strict=True):
        # The keys with the query projection, as q = m W_Q multiplies them.
        keys = keys @ (layer.alpha * layer.scale * layer.query).T
        temperatures = layer.temperatures
        different = sorted({*temperatures.tolist()})
        groups = [(temperatures == temperature).nonzero()[:, 0] for temperature in different]
        stacked_keys, stacked_values = (
            _stacked(split_heads(matrix, head.config.heads), groups) for matrix in (keys, values)
        )
        by_token = np.ascontiguousarray(stacked_values.transpose(0, 2, 1))
        folded.append(Folded(stacked_keys, by_token, np.array(different, np.float32)))
    return tuple(folded)


class FoldedHead(nn.Module):
    """One folded layer as a graph whose inputs are its constants, so that a device exchanges heads by their buffers."""

    def forward(self, logits: Tensor, keys: Tensor, values: Tensor, temperatures: Tensor, alpha: Tensor) -> Tensor:
        """Return z' [N, V].

        Args:
            logits: z, [N, V].
            keys: [G, d_g, V].
            values: [G, V, d_g].
            temperatures: [G].
            alpha: of each position, [N, 1]; 0 returns its logits unchanged.
        """
        probabilities = torch.softmax(logits / temperatures[:, None, None], dim=2)
        means = (probabilities @ values).transpose(0, 1).flatten(1)  # [N, G * d_g]
        return logits + (alpha * means) @ keys.flatten(0, 1)


def _stacked(by_head: Tensor, groups: list[Tensor]) -> Array:
    """Return [H, V, d_h] as [G, d_g, V], with the columns of a group's heads side by side."""
    columns = [by_head[heads].transpose(1, 2).flatten(0, 1) for heads in groups]
    stacked: Array = nn.utils.rnn.pad_sequence(columns, batch_first=True).cpu().numpy()
    return stacked
