"""Probes: small networks that read Xᵀy or the least-squares solution from the states of a model.

As in the paper's public code, a probe pools the tokens with weights from a softmax and applies an MLP. Its error says
what is in a state, and where; it does not say what the model uses. Two controls show what probes find without a
solver: the targets of other prompts, which are in no state, and a model with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from export.papers.looped.baselines import least_squares_weights
from export.papers.looped.functions import Prompts, draw_prompts
from export.papers.looped.model import PromptTransformer
from export.papers.looped.paths import Arrays
from export.papers.looped.seeds import EVALUATION, generator_of
from export.papers.looped.solvers import states

#: What probes look for, in the order of their errors.
TARGETS = ("Xᵀy", "least squares", "Xᵀy of other prompts")
#: Loops after which a looped model is probed.
LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 30)
_TRAINING, _HELD_OUT = 2048, 512
#: Steps of a probe's training.
STEPS = 600
_BATCH, _HIDDEN, _RATE = 256, 64, 1e-3


def probe_run(model: PromptTransformer, function: str) -> Arrays:
    """Return ``stages`` [S], loops or layers, and ``errors`` [S, 3] of the probes on held-out prompts.

    An error is the mean squared error over the variance of the targets, for each of :data:`TARGETS`.
    """
    config = model.config
    generator = generator_of(EVALUATION)
    prompts = draw_prompts(function, _TRAINING + _HELD_OUT, config.points, config.dims, generator)
    targets = _targets(prompts, generator)
    errors = {}
    for stage, tokens in _stages(model, prompts):
        errors[stage] = _probe(tokens, targets)
    return {"stages": np.array(list(errors)), "errors": np.stack(list(errors.values()))}


def untrained(model: PromptTransformer) -> PromptTransformer:
    """Return a model of the same shape with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(EVALUATION)
        return PromptTransformer(model.config).eval()


def _stages(model: PromptTransformer, prompts: Prompts) -> Iterator[tuple[int, Tensor]]:
    """Yield the tokens [N, T, D] after loops, or after each layer of an unlooped model."""
    xs, ys = prompts.xs, prompts.ys[:, :-1]
    if model.config.injection is not None:
        for loops, state in enumerate(states(model, xs, ys, max(LOOPS))):
            if loops in LOOPS:
                yield loops, state
        return
    with torch.no_grad():
        x = model.embed(xs, ys) + model.position.weight[: 2 * xs.shape[1] - 1]
    for number, layer in enumerate(model.layers, 1):
        with torch.no_grad():  # not around the yield: probes have gradients
            x = layer(x)
        yield number, x


def _targets(prompts: Prompts, generator: torch.Generator) -> Tensor:
    """Return the targets [3, N, d], each coordinate with mean 0 and variance 1."""
    xs, ys = prompts.xs[:, :-1].double(), prompts.ys[:, :-1].double()
    products = (xs.mT @ ys[..., None])[..., 0]
    others = products[torch.randperm(len(products), generator=generator)]
    found = torch.stack([products, least_squares_weights(xs, ys), others])
    return _standard(found, dims=(1,)).float()


def _probe(tokens: Tensor, targets: Tensor) -> Array:
    """Train a probe for each of the targets side by side, and return their errors on the held-out prompts."""
    # [T, N, D]: pooling is then one product for all prompts of a batch.
    pieces = torch.split(_standard(tokens, dims=(0, 1)).transpose(0, 1), _BATCH, dim=1)
    batches = [piece.contiguous() for piece in pieces]
    wanted = torch.split(targets, _BATCH, dim=1)
    probes = _Probes(len(targets), tokens.shape[1], tokens.shape[2], targets.shape[2])
    optimizer = torch.optim.Adam(probes.parameters(), lr=_RATE, fused=True)
    training = _TRAINING // _BATCH
    for step in range(STEPS):
        number = step % training
        loss = (probes(batches[number]) - wanted[number]).square().mean(dim=(1, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        held_out = zip(batches[training:], wanted[training:], strict=True)
        errors = [(probes(batch) - found).square().mean(dim=(1, 2)) for batch, found in held_out]
    variances = targets[:, _TRAINING:].var(dim=1).mean(dim=1)  # tails are heavy: not quite 1
    return (torch.stack(errors).mean(dim=0) / variances).numpy()


class _Probes(nn.Module):
    """Probes for several targets: tokens [T, N, D] to predictions [targets, N, d]."""

    def __init__(self, number: int, tokens: int, width: int, outputs: int) -> None:
        super().__init__()
        generator = generator_of(EVALUATION)

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(number, *shape, generator=generator) * shape[0] ** -0.5)

        self.places = nn.Parameter(torch.zeros(number, tokens))
        self.first, self.first_bias = weights(width, _HIDDEN), nn.Parameter(torch.zeros(number, 1, _HIDDEN))
        self.second, self.second_bias = weights(_HIDDEN, outputs), nn.Parameter(torch.zeros(number, 1, outputs))

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = (self.places.softmax(dim=1) @ tokens.flatten(1)).view(-1, *tokens.shape[1:])
        hidden = (pooled @ self.first + self.first_bias).relu()
        return hidden @ self.second + self.second_bias


def _standard(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    return (values - values.mean(dim=dims, keepdim=True)) / (values.std(dim=dims, keepdim=True) + 1e-6)
