"""Training of scores: the loss that :class:`export.finetune.finetune.TaskObjective` has beside the task's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from torch import Tensor, nn

from export.models.attention import adaptive_loss, adaptive_weight
from export.papers.adaptive.scores import scored_attentions
from export.papers.adaptive.term import Budget, CostCurve, temperature

#: The paper's lambda, in the 85 % of the steps between its first and its last.
PAPER_WEIGHT = 0.01
#: In one short fine-tuning, scores have to cross half of their range, while weights only shift a little.
SCORER_RATE = 20.0
#: A score without a network behind it moves only by its own learning rate.
GLOBAL_RATE = 200.0


class Penalty(msgspec.Struct, frozen=True):
    """Paper 002's loss: a scheduled weight times the mean score.

    Attributes:
        mode: ``literal`` has the sign of the paper, ``fixed`` the repaired one.
        weight: lambda of the long middle phase.
        rate: the learning rate of the scorers, in units of the recipe's.
    """

    mode: Literal["literal", "fixed"]
    weight: float = PAPER_WEIGHT
    rate: float = SCORER_RATE


class Target(msgspec.Struct, frozen=True):
    """The Lagrangian of :mod:`export.papers.adaptive.term`.

    Attributes:
        cost: C*, the target.
        rate: the learning rate of the scorers, in units of the recipe's.
    """

    curve: CostCurve
    cost: float
    rate: float = SCORER_RATE


class AdaptiveTerm:
    """An :class:`export.finetune.finetune.Extra` for a model with scores; see :func:`adaptive_term`."""

    def __init__(self, model: nn.Module, how: Penalty | Target) -> None:
        self._how, self._attentions = how, list(scored_attentions(model))
        self.name = str(how)
        self.rates: Mapping[nn.Parameter, float] = {
            parameter: how.rate for attention in self._attentions for parameter in attention.scorer.parameters()
        }
        self._budget: Budget | None = None
        if isinstance(how, Target):
            self._budget = Budget(how.curve, how.cost)
            model.add_module("budget", self._budget)
        self.scores: dict[nn.Module, Tensor] = {}

    def prepare(self, progress: float) -> None:
        """Cool the gates of a budget."""
        if self._budget is not None:
            for attention in self._attentions:
                attention.rank_temperature = temperature(progress)

    def loss(self, progress: float) -> Tensor:
        """Return the loss of the scores of the last forward pass."""
        scores = [self.scores[attention.scorer] for attention in self._attentions]
        if isinstance(self._how, Penalty):
            weight = adaptive_weight(progress) * self._how.weight / PAPER_WEIGHT
            return weight * adaptive_loss(scores, self._how.mode)
        assert self._budget is not None
        # The hard gates forward, so that the target is the cost that will run, and the soft ones backward.
        shares = [a.keep(s).mean(dim=(1, 2)) for a, s in zip(self._attentions, scores, strict=True)]
        cost = self._budget.cost(shares)
        loss = self._budget.loss(cost, progress)
        self._budget.ascend(cost.detach(), progress)
        return loss

    def watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Record the output of a scorer; a forward hook."""
        self.scores[module] = output


@contextmanager
def adaptive_term(model: nn.Module, how: Penalty | Target) -> Iterator[AdaptiveTerm]:
    """Yield the extra loss of a model with scores, for a training inside the block.

    Inside the block, a budget's multipliers are part of the model, so that the state of an interrupted run has them.
    """
    term = AdaptiveTerm(model, how)
    handles = [attention.scorer.register_forward_hook(term.watch) for attention in scored_attentions(model)]
    try:
        yield term
    finally:
        for handle in handles:
            handle.remove()
        if "budget" in dict(model.named_children()):
            del model.budget
