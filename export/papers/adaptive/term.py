"""Training of scores: a fine-tuning on a task with a further loss.

It is the paper's, its repair, or a Lagrangian that holds the share C of the kept coordinates to a target:

    λ1 (C - C*) + λ2 (C - C*)²

The multipliers rise by gradient ascent while the share is above the target, and λ1 never falls below zero. The target
itself falls from 1, so that no head is cut before the others can adapt, as in CoFi (arXiv 2204.00408).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from edge.files import sha256
from export.finetune.objectives import TaskObjective
from export.papers.adaptive.attention import AdaptiveAttention
from export.papers.adaptive.scores import scored_modules

#: The paper's lambda, in the 85 % of the steps between its first and its last.
PAPER_WEIGHT = 0.01
#: Learning rates in units of the recipe's. In one short fine-tuning, scores have to cross half of their range, while
#: weights only shift a little; a score without a network behind it moves only by its own learning rate.
SCORER_RATE, GLOBAL_RATE = 20.0, 200.0
#: Step sizes of the dual ascent, in units of the excess.
LINEAR_STEP, SQUARE_STEP = 0.03, 0.5
#: Shares of all steps at which the target starts to fall, and is reached.
RAMP = (0.10, 0.50)
#: Width of the soft mask around the last kept coordinate, in coordinates: at the start and at the end.
FIRST_TEMPERATURE, LAST_TEMPERATURE = 8.0, 1.0


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
    """The Lagrangian, with the target C* ``share``; ``rate`` as above."""

    share: float
    rate: float = SCORER_RATE


def adaptive_loss(scores: Sequence[Tensor], mode: Literal["literal", "fixed"]) -> Tensor:
    """Return the loss of scores, [N, H] of each layer; :func:`adaptive_weight` is its weight beside the task's."""
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


class Budget(nn.Module):
    """The multipliers, which are part of the model's state, and the loss."""

    def __init__(self, target: float) -> None:
        super().__init__()
        self.target = target
        self.multipliers: Tensor
        self.register_buffer("multipliers", torch.tensor([0.0, 1.0]))  # λ1, λ2

    def target_at(self, progress: float) -> float:
        """Return the target after a share ``progress`` of all steps: 1 at first, then falling linearly."""
        start, end = RAMP
        return 1 - (1 - self.target) * min(1.0, max(0.0, (progress - start) / (end - start)))

    def loss(self, share: Tensor, progress: float) -> Tensor:
        """Return the loss of a share C, a scalar, which is added to the task's."""
        excess = share - self.target_at(progress)
        linear, square = self.multipliers.tolist()
        loss: Tensor = linear * excess + square * excess.square()
        return loss

    @torch.no_grad()
    def ascend(self, share: Tensor, progress: float) -> None:
        """Raise the multipliers if the share is above the target; otherwise lower the first one."""
        excess = float(share) - self.target_at(progress)
        self.multipliers[0] = max(0.0, float(self.multipliers[0]) + LINEAR_STEP * excess)
        self.multipliers[1] += SQUARE_STEP * max(0.0, excess) ** 2


def temperature(progress: float) -> float:
    """Return the temperature of the ranks after a share ``progress`` of all steps; it falls linearly."""
    return FIRST_TEMPERATURE + (LAST_TEMPERATURE - FIRST_TEMPERATURE) * min(1.0, max(0.0, progress))


class AdaptiveTerm:
    """The loss of the scores of a model; see :func:`adaptive_term`."""

    def __init__(self, model: nn.Module, kind: Penalty | Target) -> None:
        self._kind, self.scored = kind, scored_modules(model)
        self.name = str(kind)
        self.rates: Mapping[nn.Parameter, float] = {
            parameter: kind.rate for module in self.scored for parameter in module.scorer.parameters()
        }
        self._budget = Budget(kind.share) if isinstance(kind, Target) else None
        if self._budget is not None:
            model.add_module("budget", self._budget)
        self._scores: dict[nn.Module, Tensor] = {}

    def prepare(self, progress: float) -> None:
        """Cool the soft masks of a budget."""
        for module in self.scored if self._budget is not None else ():
            if isinstance(module, AdaptiveAttention):
                module.rank_temperature = temperature(progress)

    def loss(self, progress: float) -> Tensor:
        """Return the loss of the scores of the last forward pass."""
        scores = [self._scores[module.scorer] for module in self.scored]
        if isinstance(self._kind, Penalty):
            weight = adaptive_weight(progress) * self._kind.weight / PAPER_WEIGHT
            return weight * adaptive_loss(scores, self._kind.mode)
        assert self._budget is not None
        # The hard gates forward, so that the target is the share that will run, and the soft ones backward.
        share = torch.stack([a.keep(s).mean() for a, s in zip(self.scored, scores, strict=True)]).mean()
        loss = self._budget.loss(share, progress)
        self._budget.ascend(share.detach(), progress)
        return loss

    def watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Record the output of a scorer; a forward hook."""
        self._scores[module] = output


@contextmanager
def adaptive_term(model: nn.Module, kind: Penalty | Target) -> Iterator[AdaptiveTerm]:
    """Yield the extra loss of a model with scores, for a training inside the block.

    Inside the block, a budget's multipliers are part of the model, so that the state of an interrupted run has them.
    """
    term = AdaptiveTerm(model, kind)
    handles = [module.scorer.register_forward_hook(term.watch) for module in term.scored]
    try:
        yield term
    finally:
        for handle in handles:
            handle.remove()
        if "budget" in dict(model.named_children()):
            del model.budget


class AdaptiveObjective(TaskObjective):
    """The objective of a task with the loss of the scores added; all arguments but ``term`` are those of the former."""

    def __init__(self, *arguments: Any, term: AdaptiveTerm, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._term, self.rates = term, term.rates

    def fingerprint(self) -> str:
        """Return a hash of the task's objective and the kind of the further loss."""
        return sha256(f"{super().fingerprint()} {self._term.name}".encode())

    def loss(self, batch: Array, progress: float) -> Tensor:
        """Return the task's loss and that of the scores."""
        self._term.prepare(progress)
        return super().loss(batch, progress) + self._term.loss(progress)
