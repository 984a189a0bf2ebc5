"""Modules that give the heads' scores, and their installation in a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from export.finetune.objectives import Head
from export.models.attention import FIRST_SCORE_LOGIT, AdaptiveMode, HeadScorer, MultiHeadAttention
from export.reduce.states import layers_of

HeadT = TypeVar("HeadT", bound=Head)


class GlobalScores(nn.Module):
    """Learnt scores that are the same for every input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.full((number,), FIRST_SCORE_LOGIT))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores [N, number] for x [N, T, d]."""
        return self.logits.sigmoid().expand(x.shape[0], -1)


class GivenScores(nn.Module):
    """Constant scores."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores: Tensor
        self.register_buffer("scores", scores.float())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores [N, H] for x [N, T, d]."""
        return self.scores.expand(x.shape[0], -1)


class SkippableAttention(nn.Module):
    """An attention with a learnt gate, the same for all inputs; closed, it returns the mean output ``constant`` [d]."""

    def __init__(self, attention: MultiHeadAttention, constant: Tensor) -> None:
        super().__init__()
        self.attention, self.scorer = attention, GlobalScores(1)
        self.constant = nn.Parameter(constant.float())
        self.rank_temperature = 1.0

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, queries: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [N, queries, d] and the gate's score [N, 1]."""
        scores = self.scorer(x, mask)
        gate = self.keep(scores).to(x.dtype)
        attended = self.attention(x, mask, queries=queries)[0]
        return gate * attended + (1 - gate) * self.constant, scores

    def keep(self, scores: Tensor) -> Tensor:
        """Return the gate [N, 1, 1], 0 or 1, for scores [N, 1]; its gradient is the score's own."""
        hard = (scores.detach() > 0.5).to(scores.dtype)
        return (hard + (scores - scores.detach()))[:, :, None]


def scored_attentions(model: nn.Module) -> Iterator[Any]:
    """Yield the modules with a ``scorer``, in order; their ``keep`` turns its scores into gates."""
    return (module for module in model.modules() if getattr(module, "scorer", None) is not None)


def with_scores(model: HeadT, mode: AdaptiveMode, scorer_of: Callable[[MultiHeadAttention, int], nn.Module]) -> HeadT:
    """Return a copy of a model with scores on every layer that has heads.

    Args:
        model: usually from :func:`export.papers.adaptive.scores.rotated_model`; it is not changed.
        scorer_of: returns the scorer for an attention and the number of its layer.
    """
    new = copy.deepcopy(model)
    for number, layer in enumerate(layers_of(new.transformer)):
        attention = layer.attention
        if attention is not None:
            scored = MultiHeadAttention(
                attention.dim,
                attention.num_heads,
                attention.head_dim,
                mode,
                scorer=scorer_of(attention, number),
                causal=attention.causal,
                scale=attention.scale,
            )
            scored.load_state_dict(attention.state_dict(), strict=False)
            layer.attention = scored.train(model.training)
    return new


def scorers(seed: int, *, share: int = 4, pooled: bool = False) -> Callable[[MultiHeadAttention, int], nn.Module]:
    """Return the ``scorer_of`` of :func:`with_scores` for MLPs of width d / ``share``; the paper has d / 4."""

    def scorer(attention: MultiHeadAttention, number: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * seed + number)
            return HeadScorer(attention.dim, attention.num_heads, attention.dim // share, pooled=pooled)

    return scorer
