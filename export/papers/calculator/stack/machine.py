"""A linear recurrent network with a stack, whose state every token multiplies with a matrix.

The state is a register and a stack of cells with two numbers each. A token computes the register and the top cell anew
from both, linearly; a token that is a number also adds a second such map times its value. Then the stack stays, is
pushed (a new cell, linear in register and top cell, comes to the top) or is popped. All tokens of one kind share their
maps, at every depth of the stack. The answer is linear in the register and the top cell after the last token.

Many machines compute the same function: a cell may hold other combinations of its two numbers, for example. So
:class:`StackFit` fixes weights one after another, and the others adapt, as long as the error on the training items
stays that of float64's rounding. FP32 holds the fixed weights exactly, so whole operands give exact sums and products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from edge.bundles.arithmetic import KINDS, MAX_DEPTH, MAX_TOKENS, OPERAND
from export.papers.calculator.stack.data import TRAIN_DEPTH, StackSplit

#: Cells of the deepest expression: one for each open parenthesis, and one outside of all.
CELLS = MAX_DEPTH + 1
#: The register and the top cell, which the maps read and write.
WINDOW = 3
STAY, PUSH, POP = range(3)

_NEVER = -1e4  # finite, because all weights of a run must be
_LEARNT_KINDS = KINDS - 1  # padding changes nothing

#: Cells of the deepest training expression.
TRAIN_CELLS = TRAIN_DEPTH + 1
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


class StackMachine(nn.Module):
    """Machines side by side that differ in their initial weights, in float64.

    Until :meth:`choose_moves`, a token makes all three moves at once, weighted by the softmax of their logits.

    Args:
        restarts: R, the number of machines.
        generator: draws the initial weights; None leaves them zero.
    """

    def __init__(self, restarts: int = 1, generator: torch.Generator | None = None) -> None:
        super().__init__()

        def normal(*shape: int, deviation: float, mean: float | Tensor = 0.0) -> nn.Parameter:
            if generator is None:
                return nn.Parameter(torch.zeros(restarts, *shape, dtype=torch.float64))
            drawn = torch.randn(restarts, *shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(mean + deviation * drawn)

        half = 0.5 * torch.eye(WINDOW, dtype=torch.float64)
        self.update = normal(_LEARNT_KINDS, WINDOW, WINDOW, deviation=0.3, mean=half)
        self.scale = normal(WINDOW, WINDOW, deviation=0.3)  # of numbers, times their value
        self.new_cell = normal(_LEARNT_KINDS, WINDOW - 1, WINDOW, deviation=0.3)
        self.moves = normal(_LEARNT_KINDS, 3, deviation=0.1)
        self.start = normal(WINDOW, deviation=0.5, mean=0.5)
        self.readout = normal(WINDOW, deviation=0.5, mean=0.5)

    def select(self, restart: int) -> StackMachine:
        """Return one of the machines alone."""
        machine = StackMachine()
        machine.load_state_dict({name: tensor[restart : restart + 1] for name, tensor in self.state_dict().items()})
        return machine

    def choose_moves(self) -> None:
        """Let every kind make its likeliest move alone from now on: the softmax of the others becomes 0."""
        with torch.no_grad():
            likeliest = functional.one_hot(self.moves.argmax(-1), 3).bool()
            self.moves.copy_(torch.where(likeliest, 0.0, _NEVER))

    def transitions(self, cells: int = CELLS) -> tuple[Tensor, Tensor]:
        """Return the matrices of the kinds, [R, 7, n, n], and that of a number's value, [R, n, n]; n = 1 + 2 cells.

        A state is the register, then the cells from the top down. What is pushed out below is lost.
        """
        restarts, size = len(self.start), 1 + 2 * cells
        identity = torch.eye(size, dtype=self.start.dtype)
        register, top = self.update[:, :, :1], self.update[:, :, 1:]  # [R, 6, 1 or 2, 3]

        def placed(*rows: Tensor) -> Tensor:
            """Return [R, 6, n, n] from rows that read the window, with the deeper cells ``kept``."""
            window = torch.cat(rows, dim=2)
            return functional.pad(window, (0, size - WINDOW, 0, size - window.shape[2]))

        deeper = torch.zeros(size, size, dtype=identity.dtype)
        deeper[WINDOW:, WINDOW:] = identity[WINDOW:, WINDOW:]
        stay = placed(register, top) + deeper
        push = placed(register, self.new_cell, top) + deeper.roll(2, 0).index_fill(0, torch.tensor([0, 1]), 0.0)
        pop = placed(register) + deeper.roll(-2, 0)
        share = self.moves.softmax(-1)[..., None, None]
        matrices = (share * torch.stack([stay, push, pop], dim=2)).sum(2)
        padding = identity.expand(restarts, 1, size, size)
        scale = functional.pad(self.scale, (0, size - WINDOW, 0, size - WINDOW))
        return torch.cat([padding, matrices], dim=1), scale

    def forward(self, kinds: Tensor, values: Tensor, cells: int = CELLS) -> Tensor:
        """Return the answers, [R, N], token by token; kinds [N, length] of int64, values [N, length] of float64."""
        matrices, scale = self.transitions(cells)
        restarts, _, size, _ = matrices.shape
        # One product for all kinds and the value's matrix, [R, n, 8n], then the part of each item's kind.
        weight = torch.cat([matrices, scale[:, None]], dim=1).permute(0, 3, 1, 2).reshape(restarts, size, -1)
        state = functional.pad(self.start, (0, size - WINDOW))[:, None].expand(-1, len(kinds), -1)
        items = torch.arange(len(kinds))
        for kind, value in zip(kinds.unbind(1), values.unbind(1), strict=True):
            moved = (state @ weight).view(restarts, len(kinds), KINDS + 1, size)
            state = moved[:, items, kind] + (value * (kind == OPERAND))[:, None] * moved[:, :, KINDS]
        return (state[:, :, :WINDOW] * self.readout[:, None]).sum(-1)


class Scan(nn.Module):
    """One machine in FP32 that multiplies the matrices of all tokens in pairs, halving their number each time.

    Six products of stacks of matrices replace 64 steps. Weights are those of a :class:`StackMachine` of one restart.
    """

    def __init__(self, machine: StackMachine) -> None:
        super().__init__()
        matrices, scale = (tensor.detach()[0].float() for tensor in machine.transitions())
        self._size = len(scale)
        scales = torch.zeros_like(matrices)
        scales[OPERAND] = scale
        window = functional.pad(torch.cat([machine.start, machine.readout]), (0, self._size - WINDOW)).detach().float()
        self.matrices: Tensor
        self.scales: Tensor
        self.start: Tensor
        self.readout: Tensor
        self.order: Tensor
        self.register_buffer("matrices", matrices.flatten(1))  # [7, n * n]
        self.register_buffer("scales", scales.flatten(1))  # [7, n * n]
        self.register_buffer("start", window[0, :, None])  # [n, 1]
        self.register_buffer("readout", window[1, None])  # [1, n]
        # With the bits of their places reversed, tokens that follow each other are half the length apart, at every
        # level: the pairs are then two contiguous halves.
        bits = MAX_TOKENS.bit_length() - 1
        self.register_buffer("order", torch.tensor([int(f"{i:0{bits}b}"[::-1], 2) for i in range(MAX_TOKENS)]))

    def forward(self, kinds: Tensor, values: Tensor) -> Tensor:
        """Return the answers, [N, 1]; kinds [N, 64] of int64, values [N, 64] of float32.

        Other kinds than those of tokens are read as the nearest one: a run has rows of several clients, and must not
        fail because of one of them.
        """
        kinds = kinds.index_select(1, self.order).clamp(0, KINDS - 1)
        values = values.index_select(1, self.order)
        flat = functional.embedding(kinds, self.matrices) + values[:, :, None] * functional.embedding(
            kinds, self.scales
        )
        product = flat.view(-1, MAX_TOKENS, self._size, self._size)
        while product.shape[1] > 1:
            first, second = product.chunk(2, dim=1)
            product = second @ first
        answers: Tensor = (self.readout @ product[:, 0] @ self.start)[:, :, 0]
        return answers


class StackBatch(NamedTuple):
    """Kinds [n, length] of int64, values [n, length] and true values [n] of float64."""

    kinds: Tensor
    values: Tensor
    truth: Tensor


def batch_of(split: StackSplit) -> StackBatch:
    """Return the items of a split without the padding that all of them have.

    Operands are the decimal numbers of the text, not their FP32 roundings: an exact machine then has no error.
    """
    length = int((split.kinds > 0).sum(1).max())
    values = torch.from_numpy(split.values[:, :length]).double().round(decimals=6)
    return StackBatch(torch.from_numpy(split.kinds[:, :length]), values, torch.from_numpy(split.truth))


def residuals(answers: Tensor, truth: Tensor) -> Tensor:
    """Return (answer - truth) / (1 + abs(truth))."""
    return (answers - truth) / (1 + truth.abs())


class StackFit:
    """The weights of a machine whose moves are chosen, fitted to items.

    Args:
        machine: of one restart; :meth:`written` changes it.
    """

    def __init__(self, machine: StackMachine, items: StackBatch) -> None:
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
