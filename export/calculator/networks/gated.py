"""Networks that treat an expression as a set of terms: an operator and its operand. Paper 000 proposes one of them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from export.papers.calculator.networks import Regressor


def terms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return operators and operands, and 1 for terms and 0 for padding, [N, 8, 1] each, of tokens [N, 15]."""
    # The first operand has no operator; it counts as added, which is 1.0.
    operators = functional.pad(x, (1, 0), value=1.0)[:, ::2, None]
    real = (2 * operators - 1).square()  # 1 for the operators 1.0 and 0.0, 0 for padding 0.5
    return operators, x[:, ::2, None], real


class Gate(Regressor):
    """Attention with signed weights: each term's operator gates its operand.

    It is the "FNN with attention" that paper 000 proposes. Summing gated terms and skipping padding build the additive
    structure in: it shows which inductive bias the other networks miss, not that a net finds the rule.

    Args:
        hidden: width of the gate's hidden layer.
        pooling: ``sum`` adds the gated terms; ``softmax`` weights them with attention that is at most 1 in all, and
            multiplies by their number.
    """

    def __init__(self, hidden: int = 16, pooling: Literal["sum", "softmax"] = "sum") -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1), nn.Tanh())
        self.value = nn.Linear(1, 1)
        self.score = _two_layers(2, hidden) if pooling == "softmax" else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        return self.attended(x)[0]

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value [N, 1], and the attention of each term, [N, 8]: its gate, or the softmax."""
        operators, operands, real = terms(x)
        gates = real * self.gate(operators)
        gated: Tensor = gates * self.value(operands)
        if self.score is None:
            return gated.sum(dim=1), gates[:, :, 0]
        logits = self.score(torch.cat([operators, operands], dim=2))
        weights = torch.softmax(torch.where(real > 0, logits, -math.inf), dim=1)
        return real.sum(dim=1) * (weights * gated).sum(dim=1), weights[:, :, 0]


class TermNetwork(Regressor):
    """One network for every term, and the sum of its outputs: no product of operator and operand is built in.

    Args:
        hidden: width of its hidden layer.
    """

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.term = _two_layers(2, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        operators, operands, real = terms(x)
        value: Tensor = (real * self.term(torch.cat([operators, operands], dim=2))).sum(dim=1)
        return value


def _two_layers(inputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
