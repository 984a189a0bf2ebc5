"""States between the layers of a model and between their halves, and measurements on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from export.tasks.objectives import Head, outputs_of, task_loss
from export.tasks.tokens import Batch
from export.transformer import Layer, Transformer

Part = Literal["attention", "feed_forward"]


class Padded(Protocol):
    """What a layer needs to know of a batch; :class:`export.tasks.tokens.Batch` is one."""

    @property
    def mask(self) -> Tensor | None:
        """[N, T], 1 for tokens and 0 for padding; None when nothing is padding."""


class Passed(NamedTuple):
    """Input and output of a module."""

    read: Tensor
    returned: Tensor


def layers_of(transformer: Transformer) -> list[Layer]:
    """Return the layers with their type."""
    return [cast(Layer, layer) for layer in transformer.layers]


def embedded(transformer: Transformer, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the input of the first layer, [N, T, d] for each batch."""
    embed: Any = transformer.embeddings
    with torch.no_grad():
        return [embed(b.inputs) if b.segments is None else embed(b.inputs, b.segments) for b in batches]


def after_attention(layer: Layer, states: Sequence[Tensor], batches: Sequence[Padded]) -> list[Tensor]:
    """Return the output of a layer's first half for ``states``, [N, T, d] for each batch."""
    with torch.no_grad():
        return [layer.after_attention(x, batch.mask) for x, batch in zip(states, batches, strict=True)]


def after_feed_forward(layer: Layer, states: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of a layer's second half for that of its first half, [N, T, d] for each batch."""
    with torch.no_grad():
        return [layer.after_feed_forward(x) for x in states]


def tokens_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the rows [n, w] of x [N, T, w] that are not padding."""
    return x.flatten(0, 1) if mask is None else x[mask.bool()]


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Passed]]:
    """Yield a dictionary that, after a forward pass in the block, has the input and output of each module."""
    found: dict[nn.Module, Passed] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found[module] = Passed(inputs[0], output)

    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def relative_error(
    before: Layer, after: Layer, part: Part, states: Sequence[Tensor], batches: Sequence[Padded]
) -> float:
    """Return the mean squared error of a half's output over the variance of the original's, without the residual."""
    count, lost = 0, 0.0
    total, squares = torch.zeros(states[0].shape[-1], dtype=torch.float64), 0.0
    for x, batch in zip(states, batches, strict=True):
        wanted, found = (
            tokens_of(_added(layer, part, x, batch.mask), batch.mask).double() for layer in (before, after)
        )
        lost += float((found - wanted).square().sum())
        squares += float(wanted.square().sum())
        total += wanted.sum(dim=0).cpu()
        count += len(wanted)
    return lost / (squares - float(total.square().sum()) / count)


def head_gradients(model: Head, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the sensitivity of the task's loss to each head: E|dL/dξ|, ξ a factor on its output; [H] per layer.

    Michel et al. 2019, "Are Sixteen Heads Really Better than One?", equation 2. A layer without heads has [0].

    Args:
        model: with the head of the task, in evaluation mode.
        batches: with targets.
    """
    attentions = [layer.attention for layer in layers_of(model.transformer)]
    sums = [torch.zeros(attention.num_heads if attention else 0) for attention in attentions]
    for batch in batches:
        with recorded(attention.output_proj for attention in attentions if attention) as found:
            loss = task_loss(model, outputs_of(model, batch), batch.targets)
        outputs = {module: passed.read for module, passed in found.items()}  # [N, T, H * d_k] of each layer
        gradients = dict(zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True))
        for total, attention in zip(sums, attentions, strict=True):
            if attention:
                product = (outputs[attention.output_proj] * gradients[attention.output_proj]).detach()
                heads = torch.unflatten(product, -1, (attention.num_heads, -1))
                total += heads.sum(dim=(1, 3)).abs().sum(dim=0).cpu()
    # The loss is a mean over its batch, so that the sum over a batch is one too.
    return [total / len(batches) for total in sums]


def _added(layer: Layer, part: Part, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the output of a half without the residual, [N, T, d]."""
    first = part == "attention"
    constant = layer.attention_constant if first else layer.feed_forward_constant
    if constant is not None:
        return constant.detach().expand_as(x)
    last = layer.attention.output_proj if first and layer.attention else cast(Any, layer.feed_forward).down
    with torch.no_grad(), recorded([last]) as found:
        if first:
            layer.after_attention(x, mask)
        else:
            layer.after_feed_forward(x)
    return found[last].returned
