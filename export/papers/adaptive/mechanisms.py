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

from export.data.tokens import Batch, Rows, sorted_batches
from export.models.attention import MultiHeadAttention
from export.models.heads import Head
from export.papers.adaptive.attention import AdaptiveMode
from export.papers.adaptive.gate import gated_model
from export.papers.adaptive.linformer import RATIO, with_linformer
from export.papers.adaptive.scores import (
    GivenScores,
    GlobalScores,
    new_scorer,
    rotated_model,
    scorers,
    shrunk_model,
    with_scores,
)
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

    dense: Head
    calibration: Rows
    seed: int
    state: Path
    share: float = 0.5

    def batches(self) -> list[Batch]:
        """Return the calibration inputs in batches."""
        return [self.calibration.batch(rows) for rows in sorted_batches(self.calibration.lengths, _BATCH)]


class ChangedModel(NamedTuple):
    """A changed model, and the mean share of its heads that is left if training does not change it."""

    model: Head
    kept: float = 1.0


_ScorerOf = Callable[[MultiHeadAttention, int], nn.Module]
_Training = Callable[[SharedInputs], Penalty | Target | None]


def _no_loss(shared: SharedInputs) -> None:
    return None


@dataclass(frozen=True)
class Mechanism:
    """A way to save attention.

    Attributes:
        make: returns the changed model.
        train: returns the loss beside the task's.
        shrink: returns smaller matrices with the same outputs; None if there are none.
        calibrated: whether it needs more calibration tokens than the widest layer has features.
        modules: returns a copy of a model with the same modules as that of ``make``; None for a plain transformer.
        passes: epochs for each one of the others, for weights that start untrained.
    """

    what: str
    make: Callable[[SharedInputs], ChangedModel]
    train: _Training = _no_loss
    shrink: Callable[[Head], Head] | None = None
    calibrated: bool = False
    modules: Callable[[Head], Head] | None = None
    passes: int = 1


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
    left = sum(shape.num_heads * shape.head_dim for shape in reduced.plan.shapes)
    return ChangedModel(reduced.model, left / sum(shape.num_heads * shape.head_dim for shape in config.layers))


def _scored(
    what: str,
    mode: AdaptiveMode,
    scorer_of: Callable[[int, float], _ScorerOf],
    train: _Training = _no_loss,
    shrink: Callable[[Head], Head] | None = None,
) -> Mechanism:
    """Return a mechanism that scores heads; ``scorer_of`` takes the seed and the share to keep."""

    def make(shared: SharedInputs) -> ChangedModel:
        rotated = rotated_model(shared.dense, shared.batches())
        return ChangedModel(with_scores(rotated, mode, scorer_of(shared.seed, shared.share)))

    return Mechanism(what, make, train, shrink, modules=lambda model: with_scores(model, mode, scorer_of(0, 0.5)))


def _at_random(seed: int, share: float) -> _ScorerOf:
    generator = torch.Generator().manual_seed(seed)
    return lambda attention, number: GivenScores(random_scores(attention.num_heads, share, generator))


def _gated(model: Head, seed: int) -> Head:
    return gated_model(
        model, lambda dim, number: new_scorer(dim, 1, _POOLED_SHARE, seed=1000 * seed + number, pooled=True)
    )


#: Mechanisms by name. "Half" in a description stands for ``SharedInputs.share``.
MECHANISMS = {
    "full": Mechanism(
        "trained on, unchanged", lambda shared: ChangedModel(copy.deepcopy(shared.dense)), shrink=copy.deepcopy
    ),
    "random": _scored("random scores", "fixed", _at_random, shrink=shrunk_model),
    "global": _scored(
        "learnt scores, for all inputs alike",
        "budget",
        lambda seed, share: lambda attention, number: GlobalScores(attention.num_heads),
        lambda shared: Target(shared.share, GLOBAL_RATE),
        shrunk_model,
    ),
    "uniform": _scored(
        "half of every head",
        "fixed",
        lambda seed, share: lambda a, number: GivenScores(torch.full((a.num_heads,), min(share, 0.5))),
        shrink=shrunk_model,
    ),
    "literal": _scored(
        "scores by input, the paper's loss",
        "literal",
        lambda seed, share: scorers(seed),
        lambda shared: Penalty("literal"),
    ),
    "fixed": _scored(
        "scores by input, repaired loss",
        "fixed",
        lambda seed, share: scorers(seed),
        lambda shared: Penalty("fixed"),
    ),
    "budget": _scored(
        "scores by input, with a budget",
        "budget",
        lambda seed, share: scorers(seed, share=_POOLED_SHARE, pooled=True),
        lambda shared: Target(shared.share),
    ),
    "linformer": Mechanism(
        "a quarter of the keys and values, twice the epochs",
        lambda shared: ChangedModel(with_linformer(shared.dense), 1 / RATIO),
        modules=with_linformer,
        passes=2,
    ),
    "skip": Mechanism(
        "half of the layers, by input",
        lambda shared: ChangedModel(_gated(shared.dense, shared.seed)),
        lambda shared: Target(shared.share),
        modules=lambda model: _gated(model, 0),
    ),
    "reduced": Mechanism("calibrated reduction of attention", _attention_plan, shrink=copy.deepcopy, calibrated=True),
}
