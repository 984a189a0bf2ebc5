"""The loss of the mode ``budget``: what the kept coordinates cost, held to a target by a Lagrangian.

    λ1 (C - C*) + λ2 (C - C*)²,   C = Σ_layers cost(share of kept coordinates) / Σ_layers cost(1)

Unlike a constant weight, which buys whatever reduction the task's loss happens to tolerate, it ends at the target. The
multipliers rise by gradient ascent while the cost is above it, λ1 never falls below zero, and the target itself comes
down from 1, so that no head is cut before it could make room: as in CoFi (arXiv 2204.00408).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from edge.errors import UsageError
from export.reduction.latency import measure_layers
from export.reduction.plan import macs_per_token
from export.transformer import LayerShape, TransformerConfig

#: Steps of the dual ascent, in units of the cost's excess.
LINEAR_STEP, SQUARE_STEP = 0.03, 0.5
#: Shares of all steps: the target starts to come down, and is reached.
RAMP = (0.10, 0.50)
#: Coordinates around the last kept one that feel the gradient, in units of coordinates: at the start and at the end.
FIRST_TEMPERATURE, LAST_TEMPERATURE = 8.0, 1.0
_PARTS = 4


class CostCurve(msgspec.Struct, frozen=True):
    """Cost of a layer, in units of the dense one, for rising shares of the coordinates of its heads.

    Attributes:
        shares: from 0 to 1, rising.
        costs: of each; between them the cost is a straight line.
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


def mac_curve(config: TransformerConfig, tokens: int) -> CostCurve:
    """Return the cost as if every multiplication took the same time."""
    dense = config.layers[0]
    none = msgspec.structs.replace(dense, num_heads=0)
    costs = [macs_per_token(config.dim, shape, tokens) for shape in (none, dense)]
    return CostCurve((0.0, 1.0), (costs[0] / costs[1], 1.0))


def measured_curve(config: TransformerConfig, tokens: int, *, cache: Path | None = None, calls: int = 60) -> CostCurve:
    """Return the cost as ONNX Runtime has it on this machine; arguments as those of ``measure_layers``."""
    dense = config.layers[0]
    widths = [max(1, dense.head_dim * part // _PARTS) for part in range(1, _PARTS)]
    shapes = [LayerShape(0, dense.head_dim, dense.ffn_dim, dense.scale)]
    shapes += [LayerShape(dense.num_heads, width, dense.ffn_dim) for width in widths]
    table = measure_layers(config, shapes, [tokens], cache=cache, calls=calls)
    costs = [1 / found.ratio for shape in shapes if (found := table.find(shape, tokens))]
    # A wider head is never cheaper; where the clock says so, it is noise.
    rising = [min(1.0, max(costs[: number + 1])) for number in range(len(costs))]
    return CostCurve((0.0, *(width / dense.head_dim for width in widths), 1.0), (*rising, 1.0))


class Budget(nn.Module):
    """The multipliers, which travel with the model's state, and the loss.

    Args:
        target: C*, of the same unit as the cost: between that of no head and 1.

    Raises:
        UsageError: the target cannot be reached, or is no reduction.
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
        """Return C, a scalar, for the share of kept coordinates of each input, [N] of each layer."""
        return self.curve.at(torch.stack(tuple(shares))).mean()

    def target_at(self, progress: float) -> float:
        """Return the target after a share ``progress`` of all steps: 1 first, then down a straight line."""
        start, end = RAMP
        return 1 - (1 - self.target) * min(1.0, max(0.0, (progress - start) / (end - start)))

    def loss(self, cost: Tensor, progress: float) -> Tensor:
        """Return what is added to the task's loss for a cost C."""
        excess = cost - self.target_at(progress)
        linear, square = self.multipliers.tolist()
        loss: Tensor = linear * excess + square * excess.square()
        return loss

    @torch.no_grad()
    def ascend(self, cost: Tensor, progress: float) -> None:
        """Raise the multipliers while the cost is above the target, and lower the first below it."""
        excess = float(cost) - self.target_at(progress)
        self.multipliers[0] = max(0.0, float(self.multipliers[0]) + LINEAR_STEP * excess)
        self.multipliers[1] += SQUARE_STEP * max(0.0, excess) ** 2


def temperature(progress: float) -> float:
    """Return the temperature of the ranks after a share ``progress`` of all steps, falling along a straight line."""
    return FIRST_TEMPERATURE + (LAST_TEMPERATURE - FIRST_TEMPERATURE) * min(1.0, max(0.0, progress))
