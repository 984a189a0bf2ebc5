"""Means of values under a softmax over the vocabulary, computed in chunks of tokens.

One pass keeps the running maximum of the logits, the sum of their exponentials, and the sum of values weighted with
them (Milakov and Gimelshein 2018, arXiv 1805.02867). The backward pass computes the weights of each chunk again from
the maximum and the sum, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). So no pass keeps anything of the
size positions × vocabulary but the logits themselves, and their gradient if it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def weighted_means(logits: Tensor, temperatures: Tensor, values: Tensor, chunk_bytes: int) -> Tensor:
    """Return softmax(logits / temperature) values for each temperature, [H, N, w].

    The result does not depend on the size of the chunks, apart from rounding; the last one may be smaller.

    Args:
        logits: [N, V]; -inf leaves a token out. At least one of a position is finite.
        temperatures: [H], positive.
        values: [H, V, w].
        chunk_bytes: the most that the temporary numbers of a chunk take in the backward pass, which has more of them:
            three for each temperature, position and token, and the gradient of each value. One token is the smallest
            chunk.
    """
    heads, tokens, width = values.shape
    per_token = heads * (3 * len(logits) + width)
    chunk = min(tokens, max(1, chunk_bytes // (per_token * logits.element_size())))
    means: Tensor = _WeightedMeans.apply(logits, temperatures, values, chunk)  # type: ignore[no-untyped-call]
    return means


class _WeightedMeans(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperatures: Tensor, values: Tensor, chunk: int) -> Tensor:
        heads, rows = len(temperatures), len(logits)
        # Finite, so that a chunk of -inf alone has weights of 0 and not NaN.
        largest = logits.new_full((heads, rows, 1), _lowest(logits))
        total = logits.new_zeros(heads, rows, 1)
        means = logits.new_zeros(heads, rows, values.shape[2])
        for tokens in _chunks(values, chunk):
            weights = _scaled(logits, temperatures, tokens)
            earlier, largest = largest, torch.maximum(largest, weights.amax(dim=2, keepdim=True))
            weights.sub_(largest).exp_()
            shrunk = (earlier - largest).exp_()
            total = total * shrunk + weights.sum(dim=2, keepdim=True)
            means = torch.baddbmm(means * shrunk, weights, values[:, tokens])
        means /= total
        ctx.save_for_backward(logits, temperatures, values, largest, total, means)
        ctx.chunk = chunk
        return means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, temperatures, values, largest, total, means = ctx.saved_tensors
        of_logits, of_temperatures, of_values, _ = ctx.needs_input_grad
        d_logits = torch.zeros_like(logits) if of_logits else None
        d_temperatures = torch.zeros_like(temperatures) if of_temperatures else None
        d_values = torch.empty_like(values) if of_values else None
        mean_change = (gradient * means).sum(dim=2, keepdim=True)
        for tokens in _chunks(values, ctx.chunk):
            # Finite, so that products with a weight of 0 are 0.
            shifted = _scaled(logits, temperatures, tokens).sub_(largest).clamp_(min=_lowest(logits))
            weights = shifted.exp().div_(total)
            if d_values is not None:
                torch.bmm(weights.mT, gradient, out=d_values[:, tokens])
            if d_logits is None and d_temperatures is None:
                continue
            change = torch.baddbmm(-mean_change, gradient, values[:, tokens].mT).mul_(weights)  # of logits / τ
            if d_temperatures is not None:
                # The changes of all tokens add up to 0, so that a common part of the logits is left out.
                d_temperatures -= shifted.mul_(change).sum(dim=(1, 2)) / temperatures
            del shifted, weights
            if d_logits is not None:
                d_logits[:, tokens] = change.div_(temperatures[:, None, None]).sum(dim=0)
        return d_logits, d_temperatures, d_values, None


def _chunks(values: Tensor, chunk: int) -> Iterator[slice]:
    for start in range(0, values.shape[1], chunk):
        yield slice(start, start + chunk)


def _scaled(logits: Tensor, temperatures: Tensor, tokens: slice) -> Tensor:
    """Return logits / temperature of some tokens as a new tensor, [H, N, tokens]."""
    return logits[:, tokens] / temperatures[:, None, None]


def _lowest(logits: Tensor) -> float:
    return torch.finfo(logits.dtype).min
