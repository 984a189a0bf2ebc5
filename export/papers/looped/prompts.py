"""The four function classes of Garg et al. 2022, and prompts drawn from them.

A prompt is points x_1 … x_n from N(0, I_d) and their values y_i = f(x_i) under one random function. A curriculum sets
all but the first coordinates to zero; the functions then have fewer dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge.datatypes import Array

#: Seeds of the prompts that evaluate a model, choose its best epoch, check a bundle, and choose learning rates. torch's
#: generator on the CPU reads the low 32 bits of a seed; training steps set the highest.
EVALUATION, VALIDATION, GOLDEN, TUNING = 0, 1000, 1001, 1002
#: Coordinates of a sparse linear function that are not zero.
SPARSITY = 3
TREE_DEPTH = 4
HIDDEN_UNITS = 100


def generator_of(seed: int) -> torch.Generator:
    """Return a generator with a seed of this module."""
    return torch.Generator().manual_seed(seed)


def training_generator(seed: int, stage: int, step: int) -> torch.Generator:
    """Return the generator of one step of a training."""
    mixed = int(np.random.SeedSequence(seed, spawn_key=(stage, step)).generate_state(1)[0])
    return torch.Generator().manual_seed(mixed | 2**31)


class Prompts(NamedTuple):
    """Points [N, n, d] and their values [N, n]."""

    xs: Tensor
    ys: Tensor

    def to(self, device: torch.device) -> Prompts:
        """Return the prompts on a device."""
        return Prompts(self.xs.to(device, non_blocking=True), self.ys.to(device, non_blocking=True))


#: Draws one function for each row of points [N, n, d], and returns its values [N, n].
Draw = Callable[[Tensor, torch.Generator], Tensor]


def linear(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Return w · x with w from N(0, I_d)."""
    return _apply(xs, torch.randn(len(xs), xs.shape[2], generator=generator))


def sparse(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Return w · x, w as in :func:`linear` with all but :data:`SPARSITY` random coordinates at zero.

    They are among those that the points have, so that a curriculum draws no function that is zero everywhere.
    """
    number, _, dims = xs.shape
    weights = torch.randn(number, dims, generator=generator)
    order = torch.rand(number, dims, generator=generator).argsort(dim=1)
    missing = (xs == 0).all(dim=(0, 1))
    ranks = order.masked_fill(missing, dims).argsort(dim=1).argsort(dim=1)
    return _apply(xs, weights * (ranks < SPARSITY))


def tree(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Return the leaf of a full binary tree: each node compares a random coordinate with 0, leaves are from N(0, 1)."""
    number, points, dims = xs.shape
    nodes = 2 ** (TREE_DEPTH + 1) - 1  # in the order of their levels: the children of i are 2i + 1 and 2i + 2
    coordinates = torch.randint(dims, (number, nodes), generator=generator)
    values = torch.randn(number, nodes, generator=generator)
    node = torch.zeros(number, points, dtype=torch.long)
    for _ in range(TREE_DEPTH):
        x = xs.gather(2, coordinates.gather(1, node)[..., None])[..., 0]
        node = 2 * node + 1 + (x > 0)
    return values.gather(1, node)


def relu(xs: Tensor, generator: torch.Generator) -> Tensor:
    """Return a network with :data:`HIDDEN_UNITS` ReLU units, its weights from N(0, 1), scaled by sqrt(2 / units)."""
    number, _, dims = xs.shape
    hidden = (xs @ torch.randn(number, dims, HIDDEN_UNITS, generator=generator)).relu()
    return math.sqrt(2 / HIDDEN_UNITS) * _apply(hidden, torch.randn(number, HIDDEN_UNITS, generator=generator))


class FunctionClass(NamedTuple):
    """A function class; errors are divided by the variance of its values in ``dims`` dimensions."""

    draw: Draw
    normaliser: Callable[[int], float]


FUNCTION_CLASSES = {
    "linear": FunctionClass(linear, float),
    "sparse": FunctionClass(sparse, lambda dims: float(min(SPARSITY, dims))),
    "tree": FunctionClass(tree, lambda dims: 1.0),
    "relu": FunctionClass(relu, float),
}


def draw_prompts(
    name: str, number: int, points: int, dims: int, generator: torch.Generator, *, active_dims: int | None = None
) -> Prompts:
    """Return prompts of a function class: xs [number, points, dims] and ys [number, points], on the CPU.

    ``active_dims`` coordinates of the points are not zero; None is all.
    """
    xs = torch.randn(number, points, dims, generator=generator)
    xs[..., dims if active_dims is None else active_dims :] = 0
    return Prompts(xs, FUNCTION_CLASSES[name].draw(xs, generator))


def squared_errors(name: str, dims: int, predictions: Array, values: Array) -> Array:
    """Return the squared errors of predictions under a function class, divided by the variance of the values."""
    errors: Array = (predictions - values) ** 2 / FUNCTION_CLASSES[name].normaliser(dims)
    return errors


def _apply(xs: Tensor, weights: Tensor) -> Tensor:
    return (xs @ weights[..., None])[..., 0]
