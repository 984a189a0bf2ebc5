"""Use of a model's heads: scores, kept coordinates, and scores by the position of a token."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from export.data.tokens import Rows, sorted_batches
from export.finetune.objectives import outputs_of
from export.models.attention import HeadScorer
from export.models.heads import SequenceClassifier
from export.papers.adaptive.scores import scored_attentions
from export.reduce.states import recorded

_BATCH = 64
_PLACES = 64


class HeadUse(msgspec.Struct, frozen=True):
    """Means over inputs.

    Attributes:
        scores: [layers, H], or [layers, 1] for gates of whole layers.
        kept: share of the coordinates in use, of the same shape.
        spread: share of a head's variance of scores that is between inputs; 0 if they are the same for all inputs.
        places: mean score over the heads by position, [layers, positions]; empty where tokens have no scores.
    """

    scores: tuple[tuple[float, ...], ...]
    kept: tuple[tuple[float, ...], ...]
    spread: float
    places: tuple[tuple[float, ...], ...] = ()


@torch.no_grad()
def head_use(model: SequenceClassifier, rows: Rows) -> HeadUse | None:
    """Return the use of a model's heads on some rows; None for a model without scores."""
    attentions = list(scored_attentions(model))
    if not attentions:
        return None
    model.eval()
    scores: list[list[Tensor]] = [[] for _ in attentions]
    kept: list[list[Tensor]] = [[] for _ in attentions]
    places = [_Places() for _ in attentions]
    for indices in sorted_batches(rows.lengths, _BATCH):
        batch = rows.batch(indices)
        with recorded(attention.scorer for attention in attentions) as found:
            outputs_of(model, batch)
        for number, attention in enumerate(attentions):
            passed = found[attention.scorer]
            scores[number].append(passed.returned)
            kept[number].append(attention.keep(passed.returned).mean(dim=2))
            if isinstance(attention.scorer, HeadScorer) and not attention.scorer.pooled:
                places[number].add(attention.scorer.of_tokens(passed.read).mean(dim=2), batch.mask)
    all_scores = torch.stack([torch.cat(layer) for layer in scores])  # [layers, n, H]
    all_kept = torch.stack([torch.cat(layer) for layer in kept])
    within, whole = all_scores.var(dim=1, correction=0).mean(), all_scores.var(correction=0)
    return HeadUse(
        rows_of(all_scores.mean(dim=1)),
        rows_of(all_kept.mean(dim=1)),
        float(within / whole) if whole > 0 else 0.0,
        tuple(place.means for place in places if place.means),
    )


class _Places:
    def __init__(self) -> None:
        self._sums, self._counts = torch.zeros(_PLACES), torch.zeros(_PLACES)

    def add(self, scores: Tensor, mask: Tensor | None) -> None:
        """Add the scores [N, T] of tokens."""
        length = min(_PLACES, scores.shape[1])
        where = torch.arange(length).expand(len(scores), -1)
        weights = torch.ones_like(scores) if mask is None else mask.to(scores.dtype)
        self._sums.index_add_(0, where.flatten(), (scores * weights)[:, :length].flatten())
        self._counts.index_add_(0, where.flatten(), weights[:, :length].flatten())

    @property
    def means(self) -> tuple[float, ...]:
        seen = self._counts > 0
        return tuple((self._sums[seen] / self._counts[seen]).tolist())


def rows_of(values: Tensor) -> tuple[tuple[float, ...], ...]:
    """Return a matrix as rows of numbers."""
    return tuple(tuple(row) for row in values.tolist())
