"""The mechanisms that are compared, each as a small object: change of the model, extra loss, and smaller matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from export.data.tokens import Batch, Encoded, sorted_batches
from export.models.attention import MultiHeadAttention
from export.models.heads import SequenceClassifier
from export.papers.adaptive.attention import AdaptiveMode
from export.papers.adaptive.scores import GivenScores, GlobalScores, rotated_model, scorers, shrunk_model, with_scores
from export.papers.adaptive.term import GLOBAL_RATE, Penalty, Target
from export.reduce.grid import Grid, grid_of
from export.reduce.losses import measure_losses
from export.reduce.plan import plan_of
from export.reduce.reduce import apply_plan
from export.reduce.search import least_loss

_BATCH = 32
#: The pooled scorer's width is d over this.
_POOLED_SHARE = 16


@dataclass(frozen=True)
class SharedInputs:
    """Common inputs of all mechanisms of a seed.

    Attributes:
        dense: the fine-tuned model; it is not changed.
        calibration: real inputs, with targets.
        state: a directory for the state of reductions.
        share: of attention to keep, for mechanisms that have a choice.
    """

    dense: SequenceClassifier
    calibration: Encoded
    seed: int
    state: Path
    share: float = 0.5

    def batches(self) -> list[Batch]:
        """Return the calibration inputs in batches."""
        return [self.calibration.batch(rows) for rows in sorted_batches(self.calibration.lengths, _BATCH)]


class ChangedModel(NamedTuple):
    """A changed model, and the mean share of its heads that is left if training does not change it."""

    model: SequenceClassifier
    kept: float = 1.0


_ScorerOf = Callable[[MultiHeadAttention, int], nn.Module]


@dataclass(frozen=True)
class Mechanism:
    """A way to save attention.

    Attributes:
        make: returns the changed model.
        train: returns the loss beside the task's.
        shrink: returns smaller matrices with the same outputs; None if there are none.
        calibrated: whether it needs more calibration tokens than the widest layer has features.
    """

    what: str
    make: Callable[[SharedInputs], ChangedModel]
    train: Callable[[SharedInputs], Penalty | Target | None] = lambda shared: None
    shrink: Callable[[SequenceClassifier], SequenceClassifier] | None = None
    calibrated: bool = False


def random_scores(heads: int, share: float, generator: torch.Generator) -> Tensor:
    """Return random scores, [H], that keep a share of the coordinates: evenly spaced from 0 on, in random order.

    Scores above the threshold of 0.5 count in full, and the others are 0.25 on average: scores from 0 to u keep 1 -
    0.375 / u of the coordinates. For a share of 0.25 and less no score is above the threshold.
    """
    highest = 0.375 / (1 - share) if share > 0.25 else 2 * share
    even = (torch.arange(heads) + 0.5) / heads * highest
    return even[torch.randperm(heads, generator=generator)].clamp(max=1.0)


def _attention_plan(shared: SharedInputs) -> ChangedModel:
    """Return the calibrated reduction that keeps ``share`` of the attention and all hidden units."""
    config = shared.dense.transformer.config
    dense = config.layers[0]
    grid, state = Grid(grid_of(config).attention, (dense.ffn_dim,)), shared.state / "attention"
    losses = measure_losses(shared.dense, shared.calibration, grid, state=state)
    shares = np.array([heads * rank / (dense.num_heads * dense.head_dim) for heads, rank in grid.attention])
    table = np.array([layer.attention for layer in losses])
    chosen = least_loss(table, shares, shared.share * len(config.layers))
    assert chosen is not None, "shares are whole numbers of bins"
    plan = plan_of(config, [grid.shape(option, 0, dense) for option in chosen])
    reduced = apply_plan(shared.dense, shared.calibration, plan, state=state)
    assert isinstance(reduced.model, SequenceClassifier)
    left = sum(shape.num_heads * shape.head_dim for shape in reduced.plan.shapes)
    return ChangedModel(reduced.model, left / sum(shape.num_heads * shape.head_dim for shape in config.layers))


def _scored(mode: AdaptiveMode, scorer: Callable[[SharedInputs], _ScorerOf]) -> Callable[[SharedInputs], ChangedModel]:
    def make(shared: SharedInputs) -> ChangedModel:
        return ChangedModel(with_scores(rotated_model(shared.dense, shared.batches()), mode, scorer(shared)))

    return make


def _at_random(shared: SharedInputs) -> _ScorerOf:
    generator = torch.Generator().manual_seed(shared.seed)
    return lambda attention, number: GivenScores(random_scores(attention.num_heads, shared.share, generator))


#: Mechanisms by name. "Half" in a description stands for ``SharedInputs.share``.
MECHANISMS = {
    "full": Mechanism(
        "trained on, unchanged", lambda shared: ChangedModel(copy.deepcopy(shared.dense)), shrink=copy.deepcopy
    ),
    "random": Mechanism("random scores", _scored("fixed", _at_random), shrink=shrunk_model),
    "global": Mechanism(
        "learnt scores, for all inputs alike",
        _scored("budget", lambda shared: lambda attention, number: GlobalScores(attention.num_heads)),
        lambda shared: Target(shared.share, GLOBAL_RATE),
        shrunk_model,
    ),
    "uniform": Mechanism(
        "half of every head",
        _scored(
            "fixed", lambda shared: lambda a, number: GivenScores(torch.full((a.num_heads,), min(shared.share, 0.5)))
        ),
        shrink=shrunk_model,
    ),
    "literal": Mechanism(
        "scores by input, the paper's loss",
        _scored("literal", lambda shared: scorers(shared.seed)),
        lambda shared: Penalty("literal"),
    ),
    "fixed": Mechanism(
        "scores by input, repaired loss",
        _scored("fixed", lambda shared: scorers(shared.seed)),
        lambda shared: Penalty("fixed"),
    ),
    "budget": Mechanism(
        "scores by input, with a budget",
        _scored("budget", lambda shared: scorers(shared.seed, share=_POOLED_SHARE, pooled=True)),
        lambda shared: Target(shared.share),
    ),
    "reduced": Mechanism("calibrated reduction of attention", _attention_plan, shrink=copy.deepcopy, calibrated=True),
}
