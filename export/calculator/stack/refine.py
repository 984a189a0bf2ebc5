"""From a machine trained by gradients to an exact one: Levenberg-Marquardt, then weights such as 0, 1 and -1.

Many machines compute the same function: a cell may hold other combinations of its two numbers, for example. Weights are
therefore fixed one after another, and the others adapt, as long as the error on the training items stays that of
float64's rounding. FP32 holds the fixed weights exactly, so that whole operands give exact sums and products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from export.papers.calculator.stack.machine import StackMachine
from export.papers.calculator.stack.train import TRAIN_CELLS, Batch, residuals

#: Mean squared relative error of a machine that is exact but for float64's rounding.
EXACT = 1e-22
_LEARNT = ("update", "scale", "new_cell", "start", "readout")
#: Functions from weights to the values at which they are fixed, in the order in which these are tried.
_TARGETS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.zeros_like,
    lambda weights: torch.where(weights < 0, -1.0, 1.0).to(weights),
    lambda weights: (8 * weights).round() / 8,
)
_ITERATIONS = 60
_LEAST_DAMPING = 1e-10
_TINY = 1e-30  # keeps a system solvable whose weights change nothing
#: Weights that are this near to their target are fixed together.
_NEAR = 1e-6


class Fit:
    """The weights of a machine whose moves are chosen, fitted to items.

    Args:
        machine: of one restart; :meth:`written` changes it.
    """

    def __init__(self, machine: StackMachine, items: Batch) -> None:
        self._machine, self._items = machine.requires_grad_(False), items
        self._shapes = {name: getattr(machine, name).shape for name in _LEARNT}
        self.weights = torch.cat([getattr(machine, name).detach().flatten() for name in _LEARNT])
        self.free = torch.ones(len(self.weights), dtype=torch.bool)
        self.error = self._error(self.weights)

    def solve(self) -> bool:
        """Fit the free weights by Levenberg-Marquardt; return whether the machine is exact then."""
        damping = 1e-3
        for _ in range(_ITERATIONS):
            if self.error < EXACT:
                break
            free = self.free.nonzero()[:, 0]
            residuals, jacobian = self._residuals(self.weights), self._jacobian()[:, free]
            normal, gradient = jacobian.T @ jacobian, jacobian.T @ residuals
            size = (normal.diagonal().mean() + _TINY) * torch.eye(len(free), dtype=torch.float64)
            for _ in range(8):
                step = torch.linalg.solve(normal + damping * size, -gradient)
                moved = self.weights.index_add(0, free, step)
                error = self._error(moved)
                if error < self.error:
                    break
                damping *= 10
            else:
                break
            self.weights, self.error, damping = moved, error, max(damping / 10, _LEAST_DAMPING)
        return self.error < EXACT

    def snap(self) -> None:
        """Fix weights of an exact machine: as many as possible at 0, of the others at 1 or -1, then at eighths."""
        for target in _TARGETS:
            stuck = torch.zeros_like(self.free)
            while (self.free & ~stuck).any():
                distance = torch.where(self.free & ~stuck, (self.weights - target(self.weights)).abs(), torch.inf)
                nearest = functional.one_hot(distance.argmin(), len(distance)).bool()
                if not self._fix(distance <= _NEAR, target) and not self._fix(nearest, target):
                    stuck |= nearest

    def _fix(self, chosen: Tensor, target: Callable[[Tensor], Tensor]) -> bool:
        """Fix the chosen weights, if any, if the others can keep the machine exact; return whether it did."""
        earlier = self.weights, self.free, self.error
        self.weights = torch.where(chosen, target(self.weights), self.weights)
        self.free, self.error = self.free & ~chosen, self._error(self.weights)
        if chosen.any() and self.solve():
            return True
        self.weights, self.free, self.error = earlier
        return False

    def written(self) -> StackMachine:
        """Return the machine with the weights written into it."""
        for name, tensor in self._named(self.weights).items():
            getattr(self._machine, name).copy_(tensor)
        return self._machine

    def _named(self, weights: Tensor) -> dict[str, Tensor]:
        parts = torch.split(weights, [shape.numel() for shape in self._shapes.values()])
        return {name: part.reshape(self._shapes[name]) for name, part in zip(_LEARNT, parts, strict=True)}

    def _residuals(self, weights: Tensor) -> Tensor:
        items = self._items
        return self._residual(weights, items.kinds, items.values, items.truth)

    def _residual(self, weights: Tensor, kinds: Tensor, values: Tensor, truth: Tensor) -> Tensor:
        answers = functional_call(self._machine, self._named(weights), (kinds, values, TRAIN_CELLS))
        return residuals(answers[0], truth)

    def _jacobian(self) -> Tensor:
        """Return the derivatives of the residuals, [n, weights]."""
        items = self._items

        def of_one(weights: Tensor, kinds: Tensor, values: Tensor, truth: Tensor) -> Tensor:
            return self._residual(weights, kinds[None], values[None], truth[None])[0]

        jacobian: Tensor = vmap(grad(of_one), in_dims=(None, 0, 0, 0))(
            self.weights, items.kinds, items.values, items.truth
        )
        return jacobian

    def _error(self, weights: Tensor) -> float:
        with torch.no_grad():
            return float(self._residuals(weights).square().mean())
