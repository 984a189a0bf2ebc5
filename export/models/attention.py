"""Multi-head attention whose heads may shrink: paper 002, "Adaptive Attention Mechanisms", and its repair.

A scorer gives each head of each input a score. Above :data:`THRESHOLD` the head runs in full. Below it, it uses only
its first d' coordinates: the others of q, and of the head's output, are zero. The paper's text has three errors, so
there is a mode for the text and one with repairs. A third mode, ``budget``, is ``fixed`` with another loss: the
Lagrangian of the share that is kept, see :mod:`export.papers.adaptive.term`.

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

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

AdaptiveMode = Literal["literal", "fixed", "budget"]

THRESHOLD = 0.5
#: Widths of the soft mask's two sigmoids: in units of the score, and of coordinates at the end of training.
GATE_TEMPERATURE = 0.1
RANK_TEMPERATURE = 1.0

#: Added to the logits of padding: exp() of it is zero in FP32, and FP16 can hold it.
MASKED_LOGIT = -1e4
#: A new scorer gives about sigmoid(2) = 0.88, so that training starts from plain attention.
FIRST_SCORE_LOGIT = 2.0


class HeadScorer(nn.Module):
    """One score per head: an MLP over tokens, d -> hidden -> hidden -> H with a sigmoid, then the mean over tokens.

    Args:
        hidden: the MLP's width; None is d/4, as paper 002 has it.
        pooled: whether the MLP reads the mean over tokens, which costs next to nothing.
    """

    def __init__(self, dim: int, num_heads: int, hidden: int | None = None, *, pooled: bool = False) -> None:
        super().__init__()
        self.pooled = pooled
        hidden = max(1, dim // 4 if hidden is None else hidden)
        last = nn.Linear(hidden, num_heads)
        nn.init.constant_(last.bias, FIRST_SCORE_LOGIT)
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last, nn.Sigmoid()
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores [N, H] of tokens x [N, T, d]; ``mask`` [N, T] is 1 for tokens and 0 for padding."""
        if self.pooled:
            pooled: Tensor = self.layers(_mean(x, mask))
            return pooled.to(x.dtype)
        return _mean(self.of_tokens(x), mask)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return the scores of each token, [N, T, H]."""
        scores: Tensor = self.layers(x)
        return scores.to(x.dtype)  # under autocast too: a sum of many needs more than 8 bits


class MultiHeadAttention(nn.Module):
    """Self-attention with separate projections, and heads that a scorer may shrink.

    Args:
        head_dim: d_k, the width of a head; H * d_k need not be d.
        adaptive: how heads shrink; None leaves the scorer out.
        scorer: returns scores [N, H] for tokens [N, T, d] and their mask; None is a :class:`HeadScorer` of its own.
        causal: whether a token attends only to itself and those before it.
        scale: of the logits; None is 1/sqrt(d_k).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        adaptive: AdaptiveMode | None = None,
        *,
        scorer: nn.Module | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.adaptive = dim, num_heads, head_dim, adaptive
        self.causal = causal
        self.scale = head_dim**-0.5 if scale is None else scale
        width = num_heads * head_dim
        self.q_proj = nn.Linear(dim, width)
        self.k_proj = nn.Linear(dim, width)
        self.v_proj = nn.Linear(dim, width)
        self.output_proj = nn.Linear(width, dim)
        self.scorer = (scorer or HeadScorer(dim, num_heads)) if adaptive else None
        #: Of the soft mask, in coordinates; a training may lower it from step to step.
        self.rank_temperature = RANK_TEMPERATURE

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, queries: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: [N, T, d].
            mask: [N, T], 1 for tokens and 0 for padding; None when nothing is padding.
            queries: number of tokens, from the first on, that attend; None is all, T.

        Returns:
            The output [N, queries, d], and the scores [N, H] or None without a scorer.
        """
        q = self._heads(self.q_proj(x[:, :queries]))  # [N, H, queries, d_k]
        k, v, bias = self.context(x, mask)
        scores = None if self.scorer is None else self.scorer(x, mask)
        # The backward pass of the fused kernel takes half the time in FP32, but six times as long in bfloat16. The
        # exporter wraps the fused kernel in reshapes, which cost a served request an eighth.
        fused = self.training and q.dtype == torch.float32
        attend: Any = functional.scaled_dot_product_attention if fused else _attend
        if scores is None:
            heads = attend(q, k, v, bias, scale=self.scale)
        else:
            keep = self.keep(scores)[:, :, None, :].to(q.dtype)  # [N, H, 1, d_k]
            heads = attend(q * keep, k, v, bias, scale=self.scale) * keep
        return self.output_proj(heads.transpose(1, 2).flatten(2)), scores

    def weights(self, x: Tensor, scores: Tensor | None = None) -> Tensor:
        """Return what each token attends to, [N, H, T, T], for tokens x [N, T, d] and their scores [N, H], if any.

        It is for display; :meth:`forward` does not keep the weights.
        """
        q = self._heads(self.q_proj(x))
        k, _, bias = self.context(x, None)
        if scores is not None:
            q = q * self.keep(scores)[:, :, None, :]
        return _weights(q, k, bias, self.scale)

    def keep(self, scores: Tensor) -> Tensor:
        """Return the mask of the coordinates in use, [N, H, d_k] of 0 and 1, for scores [N, H]."""
        if self.adaptive == "literal":
            return hard_keep(scores, self.dim, self.head_dim)
        hard = hard_keep(scores, self.head_dim, self.head_dim)
        if not self.training:
            return hard
        soft = soft_keep(scores, self.head_dim, self.head_dim, self.rank_temperature)
        # The bracket is exactly zero forward and carries the gradient backward.
        return hard + (soft - soft.detach())

    def context(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values, [N, H, T, d_k], and the bias of the logits."""
        return self._heads(self.k_proj(x)), self._heads(self.v_proj(x)), self._bias(x, mask)

    def _bias(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the bias of the logits: [N, 1, 1, T] for padding, [1, 1, T, T] for the future, or their sum."""
        bias = None if mask is None else (1 - mask.to(x.dtype))[:, None, None, :] * MASKED_LOGIT
        if not self.causal:
            return bias
        length = x.shape[1]
        future = torch.triu(torch.full((length, length), MASKED_LOGIT, dtype=x.dtype, device=x.device), diagonal=1)
        return future[None, None] if bias is None else bias + future

    def _heads(self, x: Tensor) -> Tensor:
        # [N, T, H * d_k] -> [N, H, T, d_k]
        return torch.unflatten(x, -1, (self.num_heads, self.head_dim)).transpose(1, 2)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the tokens that are not padding, [N, w] of [N, T, w].

    A sum, because autocast would round the product in :mod:`export.models.heads` to bfloat16.
    """
    if mask is None:
        return x.mean(dim=1)
    weights = mask.to(x.dtype)[:, :, None]  # [N, T, 1]
    return (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float) -> Tensor:
    return _weights(q, k, bias, scale) @ v  # [N, H, queries, d_k]


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    logits = (q * scale) @ k.transpose(-1, -2)  # [N, H, queries, T]
    if bias is not None:
        logits = logits + bias
    return torch.softmax(logits, dim=-1)


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


def soft_keep(scores: Tensor, rank_width: int, head_dim: int, rank_temperature: float = RANK_TEMPERATURE) -> Tensor:
    """Return a smooth version of :func:`hard_keep`, whose gradient trains the scorer; same arguments and shape.

    At a higher ``rank_temperature``, more coordinates around the last one contribute to the gradient.
    """
    number = torch.arange(1, head_dim + 1, dtype=scores.dtype, device=scores.device)
    rank = (rank_width * scores).clamp(min=1)[:, :, None]
    within = torch.sigmoid((rank - number + 0.5) / rank_temperature)  # [N, H, d_k]
    full = torch.sigmoid((scores - THRESHOLD) / GATE_TEMPERATURE)[:, :, None]  # [N, H, 1]
    return full + (1 - full) * within


def adaptive_loss(scores: Sequence[Tensor], mode: AdaptiveMode) -> Tensor:
    """Return the loss of scores, [N, H] of each layer; :func:`adaptive_weight` is its weight beside the task's."""
    assert mode != "budget", "its loss is that of export.papers.adaptive.term"
    stacked = torch.stack(tuple(scores))  # [layers, N, H]
    if mode == "literal":
        return (1 - stacked).mean() / stacked.shape[-1]
    return stacked.mean()


def adaptive_weight(progress: float) -> float:
    """Return paper 002's lambda after a share ``progress`` of all steps.

    The paper's phases (10 %, "remaining 90 %", "last 5 %") add up to 105 %; here the last 5 % end the 90 %.
    """
    if progress < 0.10:
        return 0.0
    if progress < 0.95:
        return 0.01
    return 0.01 + 0.04 * min(1.0, (progress - 0.95) / 0.05)
