"""A network that is exact by construction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.bundles.expression import MAX_TERMS, TOKENS
from export.papers.calculator.networks import Regressor


class Oracle(Regressor):
    """One hidden ReLU layer of 30 units that is exact by construction, without training.

    The first operand a is relu(a) - relu(-a). A term (o, x), operator before operand, is, for |x| <= M,

        relu(x + Mo - M) - relu(-x + Mo - M) - relu(x - Mo) + relu(-x - Mo)

    which is x for o = 1, -x for o = 0, and 0 for padding (o = x = 0.5), where the four cancel in pairs.

    Args:
        max_operand: M. A power of two, so that TF32 and FP16 hold it and every first-layer sum of whole operands (at
            most 2 M in size) exactly. In FP32 whole operands give exact values; with M = 1,024, others are rounded to
            multiples of 2**-13.
    """

    def __init__(self, max_operand: int = 1024) -> None:
        super().__init__()
        big = float(max_operand)
        units = 2 + 4 * (MAX_TERMS - 1)
        self.hidden = nn.Linear(TOKENS, units)
        self.output = nn.Linear(units, 1)
        weight, bias = torch.zeros(units, TOKENS), torch.zeros(units)
        sign = torch.zeros(1, units)
        weight[:2, 0] = sign[0, :2] = torch.tensor([1.0, -1.0])
        for term in range(1, MAX_TERMS):
            four = slice(4 * term - 2, 4 * term + 2)
            weight[four, 2 * term] = torch.tensor([1.0, -1.0, 1.0, -1.0])
            weight[four, 2 * term - 1] = torch.tensor([big, big, -big, -big])
            bias[four] = torch.tensor([-big, -big, 0.0, 0.0])
            sign[0, four] = torch.tensor([1.0, -1.0, -1.0, 1.0])
        self.load_state_dict(
            {"hidden.weight": weight, "hidden.bias": bias, "output.weight": sign, "output.bias": torch.zeros(1)}
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        value: Tensor = self.output(functional.relu(self.hidden(x)))
        return value
