"""Linear functions on prompts that no training draws: the shifts of Garg et al. 2022, section 4, and noise.

Points are from another distribution than N(0, I_d), values are scaled or noisy, or the last point, whose value is
predicted, is from another distribution than those before it. Each prompt has a random rotation, half-space or quadrant
of its own; the public code draws one for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from export.papers.looped.functions import Prompts, linear

#: By which points and values are multiplied.
SCALES = {"1/3": 1 / 3, "1/2": 1 / 2, "2": 2.0, "3": 3.0}
#: Deviation of the values' noise: Garg et al.'s, renormalised, and that of the paper's public code.
_NOISE, _LITTLE_NOISE = 1.0, 0.1

#: Changes points [N, n, d] of N(0, I_d).
Change = Callable[[Tensor, torch.Generator], Tensor]


class Shift(NamedTuple):
    """A distribution of prompts.

    Attributes:
        points: changes the points.
        scale: of the values; errors are divided by its square, and by that of the points.
        point_scale: of the points.
        noise: deviation of the values' noise before ``scale``.
        last_only: only the last point is changed, so that each number of pairs has prompts of its own.
        below_dims: it needs fewer pairs than dimensions.
    """

    points: Change = lambda xs, generator: xs
    scale: float = 1.0
    point_scale: float = 1.0
    noise: float = 0.0
    renormalised: bool = False
    last_only: bool = False
    below_dims: bool = False

    def draw(self, number: int, points: int, dims: int, generator: torch.Generator) -> Prompts:
        """Return prompts: xs [number, points, dims] and ys [number, points]."""
        xs = self.point_scale * self.points(torch.randn(number, points, dims, generator=generator), generator)
        ys = linear(xs, generator)
        if self.noise:
            ys = ys + self.noise * torch.randn(ys.shape, generator=generator)
        if self.renormalised:
            ys = ys * math.sqrt(dims / (dims + self.noise**2))
        return Prompts(xs, self.scale * ys)

    def normaliser(self, dims: int) -> float:
        """Return the variance of the values, in which noise counts only if they are renormalised."""
        return dims * (self.scale * self.point_scale) ** 2


def skewed(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Give the covariance eigenvalues proportional to 1 / i², of the usual sum d, in a random basis."""
    return _stretched(xs, 1 / torch.arange(1, xs.shape[2] + 1), generator)


def half_subspace(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Project onto a random subspace of d / 2 dimensions (rounded down), and restore the usual variance."""
    return _stretched(xs, (torch.arange(xs.shape[2]) < max(1, xs.shape[2] // 2)).float(), generator)


def quadrant(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Move all points but the last into one random quadrant."""
    signs = torch.randn(len(xs), 1, xs.shape[2], generator=generator).sign()
    return torch.cat([xs[:, :-1].abs() * signs, xs[:, -1:]], dim=1)


def orthogonal(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Make the last point orthogonal to all others, without a change of its length; they are fewer than d."""
    others, last = xs[:, :-1], xs[:, -1:]
    basis = torch.linalg.qr(others.mT).Q  # [N, d, k]
    rest = last - last @ basis @ basis.mT
    return torch.cat([others, rest * (last.norm(dim=2) / rest.norm(dim=2))[..., None]], dim=1)


def repeated(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Make the last point a copy of a random earlier one."""
    rows = torch.randint(xs.shape[1] - 1, (len(xs), 1, 1), generator=generator).expand(-1, 1, xs.shape[2])
    return torch.cat([xs[:, :-1], xs.gather(1, rows)], dim=1)


def _stretched(xs: Tensor, deviations: Tensor, generator: torch.Generator) -> Tensor:
    """Multiply coordinates in a random basis by these deviations, rescaled so that the mean square stays 1."""
    number, _, dims = xs.shape
    basis = torch.linalg.qr(torch.randn(number, dims, dims, generator=generator)).Q
    deviations = deviations * math.sqrt(dims) / deviations.norm()
    stretched: Tensor = xs @ (basis * deviations) @ basis.mT
    return stretched


SHIFTS: dict[str, Shift] = {
    "none": Shift(),
    "skewed covariance": Shift(skewed),
    "half-subspace": Shift(half_subspace),
    **{f"points × {name}": Shift(point_scale=scale) for name, scale in SCALES.items()},
    **{f"values × {name}": Shift(scale=scale) for name, scale in SCALES.items()},
    "noise 1, renormalised": Shift(noise=_NOISE, renormalised=True),
    "noise 0.1": Shift(noise=_LITTLE_NOISE),
    "quadrants": Shift(quadrant, last_only=True),
    "orthogonal last point": Shift(orthogonal, last_only=True, below_dims=True),
    "repeated point": Shift(repeated, last_only=True),
}
