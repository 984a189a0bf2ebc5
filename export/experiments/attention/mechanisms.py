"""Mechanisms of paper 002, each as a small object: change of the model, extra loss, and shrinking."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from export.models.attention import AdaptiveMode, MultiHeadAttention
from export.models.heads import SequenceClassifier
from export.papers.adaptive.baselines import LinformerAttention, SparseAttention, like
from export.papers.adaptive.records import ChangedModel, SharedInputs
from export.papers.adaptive.reductions import attention_plan, pruned_by_gradient, whole_plan
from export.papers.adaptive.scores import (
    GivenScores,
    GlobalScores,
    SkippableAttention,
    rotated_model,
    scorers,
    shrunk_model,
    with_scores,
)
from export.papers.adaptive.term import GLOBAL_RATE, PAPER_WEIGHT, SHARE, Penalty, Target
from export.reduce.calibration import attention_statistics
from export.reduce.states import after_feed_forward, embedded, layers_of
from export.reduce.sublayers import AttentionReducer

#: The pooled scorer's width is d over this.
_POOLED_SHARE = 16


@dataclass(frozen=True)
class Mechanism:
    """A way to save attention.

    Attributes:
        make: returns the changed model.
        train: returns the loss beside the task's.
        shrink: returns smaller matrices with the same outputs; None if there are none.
        int8: whether it is also measured in INT8.
        calibrated: whether it needs more calibration tokens than the widest layer has features.
        by_time: whether it chooses by the measured times of all options.
    """

    name: str
    what: str
    make: Callable[[SharedInputs], ChangedModel]
    train: Callable[[SharedInputs], Penalty | Target | None] = lambda shared: None
    shrink: Callable[[SequenceClassifier], SequenceClassifier] | None = None
    int8: bool = False
    calibrated: bool = False
    by_time: bool = False


def random_scores(heads: int, share: float, generator: torch.Generator) -> Tensor:
    """Return random scores, [H], that keep a share of the coordinates: evenly spaced from 0 on, in random order.

    Scores above the threshold of 0.5 count in full, and the others are 0.25 on average: scores from 0 to u keep 1 -
    0.375 / u of the coordinates. For a share of 0.25 and less no score is above the threshold.
    """
    highest = 0.375 / (1 - share) if share > 0.25 else 2 * share
    even = (torch.arange(heads) + 0.5) / heads * highest
    return even[torch.randperm(heads, generator=generator)].clamp(max=1.0)


def _replaced(shared: SharedInputs, new: Callable[[MultiHeadAttention, int], MultiHeadAttention]) -> ChangedModel:
    model = copy.deepcopy(shared.dense)
    for number, layer in enumerate(layers_of(model.transformer)):
        assert layer.attention is not None
        layer.attention = new(layer.attention, number)
    return ChangedModel(model)


def _linformer(shared: SharedInputs) -> ChangedModel:
    positions = shared.dense.transformer.config.max_positions
    return _replaced(
        shared, lambda a, number: like(LinformerAttention(a.dim, a.num_heads, a.head_dim, positions, a.scale), a)
    )


def _bigbird(shared: SharedInputs) -> ChangedModel:
    positions = shared.dense.transformer.config.max_positions

    def sparse(a: MultiHeadAttention, number: int) -> MultiHeadAttention:
        return like(SparseAttention(a.dim, a.num_heads, a.head_dim, positions, 100 * shared.seed + number, a.scale), a)

    return _replaced(shared, sparse)


def _skip(shared: SharedInputs) -> ChangedModel:
    model, batches = copy.deepcopy(shared.dense), shared.batches()
    states = embedded(model.transformer, batches)
    for original, layer in zip(layers_of(shared.dense.transformer), layers_of(model.transformer), strict=True):
        statistics, after = attention_statistics(original, states, batches)
        assert layer.attention is not None
        constant = AttentionReducer(layer.attention, statistics).reduced(0, 1).constant
        assert constant is not None
        layer.attention = SkippableAttention(layer.attention, constant)  # type: ignore[assignment]
        states = after_feed_forward(original, after)
    return ChangedModel(model)


def _scored(
    mode: AdaptiveMode, scorer: Callable[[SharedInputs], Callable[[MultiHeadAttention, int], nn.Module]]
) -> Callable[[SharedInputs], ChangedModel]:
    def make(shared: SharedInputs) -> ChangedModel:
        return ChangedModel(with_scores(rotated_model(shared.dense, shared.batches()), mode, scorer(shared)))

    return make


def _at_random(shared: SharedInputs) -> Callable[[MultiHeadAttention, int], nn.Module]:
    generator = torch.Generator().manual_seed(shared.seed)
    return lambda a, number: GivenScores(random_scores(a.num_heads, shared.share, generator))


def _same_share(rate: float) -> Callable[[SharedInputs], Target]:
    return lambda shared: Target(SHARE, shared.share, rate)


def _same_cost(shared: SharedInputs) -> Target:
    curve = shared.costs.curve
    return Target(curve, float(curve.at(torch.tensor(shared.share, dtype=torch.float64))))


def _paper(
    name: str, what: str, mode: Literal["literal", "fixed"], *, share: int = 4, weight: float = PAPER_WEIGHT
) -> Mechanism:
    make = _scored(mode, lambda shared: scorers(shared.seed, share=share))
    return Mechanism(name, what, make, lambda shared: Penalty(mode, weight))


def _named(*mechanisms: Mechanism) -> dict[str, Mechanism]:
    return {mechanism.name: mechanism for mechanism in mechanisms}


#: Mechanisms of the comparison. "Half" in a description stands for ``SharedInputs.share``.
MECHANISMS = _named(
    Mechanism(
        "full", "trained on, unchanged", lambda g: ChangedModel(copy.deepcopy(g.dense)), shrink=copy.deepcopy, int8=True
    ),
    Mechanism("linformer", "keys and values to n/4", _linformer),
    Mechanism("bigbird", "window, global and random blocks, as a mask", _bigbird),
    Mechanism("skip", "a learnt gate per layer", _skip, _same_share(GLOBAL_RATE), shrunk_model),
    Mechanism("gradient", "half of the heads, by gradients", pruned_by_gradient, shrink=copy.deepcopy),
    Mechanism("random", "random scores", _scored("fixed", _at_random), shrink=shrunk_model),
    Mechanism(
        "global",
        "learnt scores, for all inputs alike",
        _scored("budget", lambda g: lambda a, number: GlobalScores(a.num_heads)),
        _same_share(GLOBAL_RATE),
        shrunk_model,
    ),
    Mechanism(
        "uniform",
        "half of every head",
        _scored("fixed", lambda g: lambda a, number: GivenScores(torch.full((a.num_heads,), min(g.share, 0.5)))),
        shrink=shrunk_model,
    ),
    _paper("literal", "scores by input, the paper's loss", "literal"),
    _paper("fixed", "scores by input, repaired loss", "fixed"),
    Mechanism(
        "budget",
        "scores by input, budget of time",
        _scored("budget", lambda g: scorers(g.seed, share=_POOLED_SHARE, pooled=True)),
        _same_cost,
    ),
    Mechanism(
        "ours-attention", "calibrated reduction, attention alone", attention_plan, shrink=copy.deepcopy, calibrated=True
    ),
    Mechanism(
        "ours",
        "calibrated reduction, FFN too",
        whole_plan,
        shrink=copy.deepcopy,
        int8=True,
        calibrated=True,
        by_time=True,
    ),
)

#: Tables V and VI of the paper, with the repaired loss; d/4 and 0.01 are ``fixed`` itself.
ABLATIONS = _named(
    *(_paper(f"width-d{share}", f"fixed, scorer of d/{share}", "fixed", share=share) for share in (8, 2)),
    _paper("width-d", "fixed, scorer of d", "fixed", share=1),
    *(_paper(f"lambda-{weight:g}", f"fixed, lambda {weight:g}", "fixed", weight=weight) for weight in (0.0, 0.05, 0.1)),
)
