"""Attention whose heads may shrink: paper 002, "Adaptive Attention Mechanisms", and its repair.

A scorer gives each head of each input a score. Above :data:`THRESHOLD` the head runs in full. Below it, it uses only
its first d' coordinates: the others of q, and of the head's output, are zero. The paper's text has three errors, so
there is a mode for the text and one with repairs. A third mode, ``budget``, is ``fixed`` with another loss: the
Lagrangian of the share that is kept. :mod:`export.papers.adaptive.term` has the losses.

=============  ==============================================  ====================================================
mode           ``literal``, as the paper writes                ``fixed``
=============  ==============================================  ====================================================
rank d'        max(1, floor(d * score)), d the model's width:  max(1, floor(d_k * score)), d_k the head's width
               no reduction unless score < d_k / d
gradient       none: a comparison and a floor                  straight-through, that of a soft mask
added loss     mean(1 - score) / H: falls as scores **rise**   mean(score): falls as scores fall
=============  ==============================================  ====================================================

The scale stays 1 / sqrt(d_k) in all, so that a full head is plain attention.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from export.models.attention import MultiHeadAttention

AdaptiveMode = Literal["literal", "fixed", "budget"]

THRESHOLD = 0.5
#: Widths of the soft mask's two sigmoids: in units of the score, and of coordinates at the end of training.
GATE_TEMPERATURE = 0.1
RANK_TEMPERATURE = 1.0

#: A new scorer gives about sigmoid(2) = 0.88, so that training starts from plain attention.
FIRST_SCORE_LOGIT = 2.0


class HeadScorer(nn.Module):
    """One score per head: an MLP over tokens, d -> hidden -> hidden -> H with a sigmoid, then the mean over tokens.

    Args:
        share: the MLP's width is d over this; 4 is paper 002's.
        pooled: whether the MLP reads the mean over tokens, which costs next to nothing.
    """

    def __init__(self, dim: int, num_heads: int, share: int = 4, *, pooled: bool = False) -> None:
        super().__init__()
        self.pooled, hidden = pooled, max(1, dim // share)
        last = nn.Linear(hidden, num_heads)
        nn.init.constant_(last.bias, FIRST_SCORE_LOGIT)
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last, nn.Sigmoid()
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores [N, H] of tokens x [N, T, d]; ``mask`` [N, T] is 1 for tokens and 0 for padding."""
        scores: Tensor = self.layers(_mean(x, mask) if self.pooled else x)
        scores = scores.to(x.dtype)  # under autocast too: a sum of many needs more than 8 bits
        return scores if self.pooled else _mean(scores, mask)


class AdaptiveAttention(MultiHeadAttention):
    """Attention with a scorer, which may shrink its heads.

    Args:
        attention: the weights and the shape.
        scorer: returns scores [N, H] for tokens [N, T, d] and their mask.
    """

    def __init__(self, attention: MultiHeadAttention, adaptive: AdaptiveMode, scorer: nn.Module) -> None:
        shape = attention.dim, attention.num_heads, attention.head_dim
        super().__init__(*shape, causal=attention.causal, scale=attention.scale)
        self.load_state_dict(attention.state_dict())
        self.adaptive, self.scorer = adaptive, scorer
        #: Of the soft mask, in coordinates; a training may lower it from step to step.
        self.rank_temperature = RANK_TEMPERATURE
        self.train(attention.training)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, queries: int | None = None) -> Tensor:
        """Return [N, queries, d]; arguments as for :class:`export.models.attention.MultiHeadAttention`."""
        q = self.q_proj(x[:, :queries])
        keep = self.keep(self.scorer(x, mask)).flatten(1)[:, None].to(q.dtype)  # [N, 1, H * d_k]
        output: Tensor = self.output_proj(self.attend(q * keep, x, mask) * keep)
        return output

    def keep(self, scores: Tensor) -> Tensor:
        """Return the mask of the coordinates in use, [N, H, d_k] of 0 and 1, for scores [N, H]."""
        if self.adaptive == "literal":
            return hard_keep(scores, self.dim, self.head_dim)
        hard = hard_keep(scores, self.head_dim, self.head_dim)
        if not self.training:
            return hard
        soft = soft_keep(scores, self.head_dim, self.head_dim, self.rank_temperature)
        return straight_through(hard, soft)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the tokens that are not padding, [N, w] of [N, T, w].

    A sum, because autocast would round the product in :mod:`export.models.heads` to bfloat16.
    """
    if mask is None:
        return x.mean(dim=1)
    weights = mask.to(x.dtype)[:, :, None]  # [N, T, 1]
    return (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def hard_keep(scores: Tensor, rank_width: int, head_dim: int) -> Tensor:
    """Return the mask of used coordinates: all above the threshold, else the first max(1, floor(rank_width * score)).

    Args:
        scores: [N, H].
        rank_width: number of coordinates for a score of 1: d in literal mode, d_k in fixed mode.

    Returns:
        [N, H, d_k] of 0 and 1; no gradient flows through it.
    """
    number = torch.arange(1, head_dim + 1, dtype=scores.dtype, device=scores.device)
    rank = (rank_width * scores.detach()).clamp(min=1)[:, :, None]
    # number <= floor(rank) is number <= rank, because number is whole.
    return ((scores.detach()[:, :, None] > THRESHOLD) | (number <= rank)).to(scores.dtype)


def soft_gate(scores: Tensor) -> Tensor:
    """Return a smooth version of being above the threshold, whose gradient trains the scorer."""
    return torch.sigmoid((scores - THRESHOLD) / GATE_TEMPERATURE)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """Return ``hard``, with the gradient of ``soft``."""
    # The bracket is exactly zero forward and carries the gradient backward.
    return hard + (soft - soft.detach())


def soft_keep(scores: Tensor, rank_width: int, head_dim: int, rank_temperature: float = RANK_TEMPERATURE) -> Tensor:
    """Return a smooth version of :func:`hard_keep`, whose gradient trains the scorer; same arguments and shape.

    At a higher ``rank_temperature``, more coordinates around the last one contribute to the gradient.
    """
    number = torch.arange(1, head_dim + 1, dtype=scores.dtype, device=scores.device)
    rank = (rank_width * scores).clamp(min=1)[:, :, None]
    within = torch.sigmoid((rank - number + 0.5) / rank_temperature)  # [N, H, d_k]
    full = soft_gate(scores)[:, :, None]  # [N, H, 1]
    return full + (1 - full) * within
