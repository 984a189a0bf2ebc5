"""The loss of the mode ``budget``: a Lagrangian that holds the cost of the kept coordinates to a target.

    λ1 (C - C*) + λ2 (C - C*)²,   C = Σ_layers cost(share of kept coordinates) / Σ_layers cost(1)

A constant weight reduces as far as the task's loss happens to tolerate; this loss ends at the target. The multipliers
rise by gradient ascent while the cost is above it, and λ1 never falls below zero. The target itself falls from 1, so
that no head is cut before the others can adapt, as in CoFi (arXiv 2204.00408).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from edge.errors import UsageError
from export.models.transformer import LayerShape, TransformerConfig
from export.reduce.latency import measure_layers
from export.training.points import Point

#: Step sizes of the dual ascent, in units of the excess cost.
LINEAR_STEP, SQUARE_STEP = 0.03, 0.5
#: Shares of all steps at which the target starts to fall, and is reached.
RAMP = (0.10, 0.50)
#: Width of the soft mask around the last kept coordinate, in coordinates: at the start and at the end.
FIRST_TEMPERATURE, LAST_TEMPERATURE = 8.0, 1.0
_PARTS = 4


class CostCurve(msgspec.Struct, frozen=True):
    """Cost of a layer, in units of the dense one, at ``shares`` of its heads' coordinates that rise from 0 to 1.

    Between two shares the cost is a straight line.
    """

    shares: tuple[float, ...]
    costs: tuple[float, ...]

    def at(self, share: Tensor) -> Tensor:
        """Return the costs at shares of any shape, differentiable."""
        shares, costs = (torch.tensor(v, dtype=share.dtype, device=share.device) for v in (self.shares, self.costs))
        right = torch.searchsorted(shares, share.detach().contiguous()).clamp(1, len(shares) - 1)
        slope = (costs[right] - costs[right - 1]) / (shares[right] - shares[right - 1])
        return costs[right - 1] + slope * (share - shares[right - 1])


#: The cost is the share itself.
SHARE = CostCurve((0.0, 1.0), (0.0, 1.0))


def measured_curve(config: TransformerConfig, tokens: int, *, cache: Path | None = None, calls: int = 60) -> CostCurve:
    """Return the cost as measured with ONNX Runtime; see :func:`export.reduce.latency.measure_layers`."""
    dense = config.layers[0]
    widths = [max(1, dense.head_dim * part // _PARTS) for part in range(1, _PARTS)]
    shapes = [LayerShape(0, dense.head_dim, dense.ffn_dim, dense.scale)]
    shapes += [LayerShape(dense.num_heads, width, dense.ffn_dim) for width in widths]
    table = measure_layers(config, shapes, [Point(tokens)], cache=cache, calls=calls)
    costs = [1 / found.ratio for shape in shapes if (found := table.find(shape, tokens))]
    # A wider head is never cheaper: a measurement that shows it is noise.
    rising = [min(1.0, max(costs[: number + 1])) for number in range(len(costs))]
    return CostCurve((0.0, *(width / dense.head_dim for width in widths), 1.0), (*rising, 1.0))


class Budget(nn.Module):
    """The multipliers, which are part of the model's state, and the loss.

    Raises:
        UsageError: the target is outside of that range.
    """

    def __init__(self, curve: CostCurve, target: float) -> None:
        super().__init__()
        if not curve.costs[0] <= target <= 1:
            expected = f"{curve.costs[0]:.3f}, a layer without heads, to 1"
            raise UsageError("target of a budget", given=target, expected=expected, fix="Choose one between.")
        self.curve, self.target = curve, target
        self.multipliers: Tensor
        self.register_buffer("multipliers", torch.tensor([0.0, 1.0]))  # λ1, λ2

    def cost(self, shares: Sequence[Tensor]) -> Tensor:
        """Return C, a scalar, for the shares of kept coordinates, [N] of each layer."""
        return self.curve.at(torch.stack(tuple(shares))).mean()

    def target_at(self, progress: float) -> float:
        """Return the target after a share ``progress`` of all steps: 1 at first, then falling linearly."""
        start, end = RAMP
        return 1 - (1 - self.target) * min(1.0, max(0.0, (progress - start) / (end - start)))

    def loss(self, cost: Tensor, progress: float) -> Tensor:
        """Return the loss of a cost C, which is added to the task's."""
        excess = cost - self.target_at(progress)
        linear, square = self.multipliers.tolist()
        loss: Tensor = linear * excess + square * excess.square()
        return loss

    @torch.no_grad()
    def ascend(self, cost: Tensor, progress: float) -> None:
        """Raise the multipliers if the cost is above the target; otherwise lower the first one."""
        excess = float(cost) - self.target_at(progress)
        self.multipliers[0] = max(0.0, float(self.multipliers[0]) + LINEAR_STEP * excess)
        self.multipliers[1] += SQUARE_STEP * max(0.0, excess) ** 2


def temperature(progress: float) -> float:
    """Return the temperature of the ranks after a share ``progress`` of all steps; it falls linearly."""
    return FIRST_TEMPERATURE + (LAST_TEMPERATURE - FIRST_TEMPERATURE) * min(1.0, max(0.0, progress))
