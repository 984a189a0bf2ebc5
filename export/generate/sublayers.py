"""Heads and neurons of a causal model of transformers: the weights of each, and the model without it.

A removed head has zeros in all its weights, and so has a removed neuron: the model keeps its shapes and its class, and
no gradient moves those weights. :func:`drop_removed` takes them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Sublayer(NamedTuple):
    """Half of a layer: G groups of features that its last projection reads.

    A group is one hidden unit of a feed-forward, or a head of keys and values with all heads of queries that share it.

    Attributes:
        inner: each projection that computes the features, and which of its outputs are each group's, [G, m].
        output: the last projection.
        features: which of its inputs are each group's, [G, w], in ascending order.
    """

    inner: tuple[tuple[nn.Module, Tensor], ...]
    output: nn.Module
    features: Tensor

    @property
    def groups(self) -> int:
        """G."""
        return len(self.features)

    @property
    def weight(self) -> Tensor:
        """Weights of the last projection, [G * w, d], float64; a copy."""
        return _by_input(self.output).detach().cpu().double().clone()

    @property
    def has_bias(self) -> bool:
        """Whether the last projection has a bias."""
        return self.output.bias is not None

    @property
    def parameters(self) -> int:
        """The number of parameters of each group."""
        return sum(weights[0].numel() for weights in self._weights())

    def left(self) -> Tensor:
        """Return the numbers of the groups that add to the output, the first one if none does."""
        left = (_by_input(self.output)[self.features] != 0).any(2).any(1).nonzero()[:, 0]
        return left if len(left) else torch.tensor([0])

    @torch.no_grad()
    def remove(self, groups: Sequence[int]) -> None:
        """Set all weights of some groups to zero."""
        chosen = torch.tensor(groups, dtype=torch.int64)
        for module, index in self.inner:
            for stored in _by_output(module):
                stored[index[chosen].flatten()] = 0
        _by_input(self.output)[self.features[chosen].flatten()] = 0

    @torch.no_grad()
    def fill(self, weight: Tensor, shift: Tensor) -> None:
        """Set the weights [G * w, d] of the last projection, and add ``shift`` [d] to its bias, if it has one."""
        output: Any = self.output
        _by_input(output).copy_(weight)
        if output.bias is not None:
            output.bias.add_(shift.to(output.bias))

    @torch.no_grad()
    def drop_removed(self) -> None:
        """Take all groups but :meth:`left` out of the projections; their order stays."""
        left = self.left()
        for module, index in self.inner:
            _keep(module, index[left].flatten().sort().values, inputs=False)
        _keep(self.output, self.features[left].flatten(), inputs=True)

    def _weights(self) -> list[Tensor]:
        """Return the weights of all groups in each projection and bias, [G, …]; copies."""
        inner = [stored.detach()[index] for module, index in self.inner for stored in _by_output(module)]
        return [*inner, _by_input(self.output).detach()[self.features]]


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model of :data:`export.generate.model.ARCHITECTURES`."""
    base = model.base_model
    return list(base.h if hasattr(base, "h") else base.layers)


def attention_of(layer: Any, config: Any) -> Sublayer:
    """Return the attention of a layer; its groups are the heads of keys and values."""
    if hasattr(layer, "attn"):
        heads, width = config.num_attention_heads, layer.attn.head_dim
        features = _consecutive(heads, width)
        all_three = torch.cat([features + third * heads * width for third in range(3)], dim=1)
        return Sublayer(((layer.attn.c_attn, all_three),), layer.attn.c_proj, features)
    attention = layer.self_attn
    width, groups = attention.head_dim, config.num_key_value_heads
    queries, shared = _consecutive(groups, config.num_attention_heads // groups * width), _consecutive(groups, width)
    inner = ((attention.q_proj, queries), (attention.k_proj, shared), (attention.v_proj, shared))
    return Sublayer(inner, attention.o_proj, queries)


def feed_forward_of(layer: Any) -> Sublayer:
    """Return the feed-forward of a layer; its groups are the hidden units."""
    mlp = layer.mlp
    gpt2 = hasattr(mlp, "c_fc")
    inner, output = ((mlp.c_fc,), mlp.c_proj) if gpt2 else ((mlp.gate_proj, mlp.up_proj), mlp.down_proj)
    units = _consecutive(len(_by_input(output)), 1)
    return Sublayer(tuple((module, units) for module in inner), output, units)


def sublayers_of(model: Any) -> list[tuple[Sublayer, Sublayer]]:
    """Return attention and feed-forward of each layer of a model."""
    config = model.config.get_text_config()
    return [(attention_of(layer, config), feed_forward_of(layer)) for layer in layers_of(model)]


def left_parameters(model: Any, block: range | None = None) -> int:
    """Return the number of parameters that :func:`drop_removed` leaves, of a model or of a block of its layers.

    The first block has the embeddings, too, and the last one the read-out, which may be the same weights.
    """
    layers, sublayers = layers_of(model), sublayers_of(model)
    block = block or range(len(layers))
    parameters = {weights for index in block for weights in layers[index].parameters()}
    if 0 in block:
        parameters |= {*model.base_model.parameters()} - {weights for of in layers for weights in of.parameters()}
    if len(layers) - 1 in block:
        parameters |= {*model.get_output_embeddings().parameters()}
    removed = sum(of.parameters * (of.groups - len(of.left())) for index in block for of in sublayers[index])
    return sum(int(weights.numel()) for weights in parameters) - removed


def drop_removed(model: Any) -> tuple[int, ...]:
    """Take out the heads and neurons that add nothing, but the first of a layer that would have none, in place.

    The outputs stay the same. The configuration stays, too, so that the model can be run but not saved.

    Returns:
        The number of heads of keys and values that each layer has left.
    """
    heads = []
    for layer, (attention, feed_forward) in zip(layers_of(model), sublayers_of(model), strict=True):
        heads.append(len(attention.left()))
        attention.drop_removed()
        feed_forward.drop_removed()
        if hasattr(layer, "attn"):  # GPT-2 cuts one tensor into queries, keys and values of this size
            layer.attn.split_size = layer.attn.c_attn.nf // 3
    return tuple(heads)


def _consecutive(groups: int, width: int) -> Tensor:
    return torch.arange(groups * width).reshape(groups, width)


def _by_input(module: Any) -> Tensor:
    """Return a view of the weights of a projection, [in, out]; GPT-2 stores them so, and others transposed."""
    weight: Tensor = module.weight
    return weight.T if isinstance(module, nn.Linear) else weight


def _by_output(module: Any) -> list[Tensor]:
    """Return a view of the weights of a projection, [out, in], and its bias, [out], if it has one."""
    return [_by_input(module).T, *([] if module.bias is None else [module.bias])]


def _keep(module: Any, chosen: Tensor, *, inputs: bool) -> None:
    """Keep some inputs, or outputs, of a projection."""
    linear = isinstance(module, nn.Linear)
    module.weight = nn.Parameter(module.weight.detach().index_select(int(linear == inputs), chosen))
    if not inputs and module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach()[chosen])
    sizes = ("in_features", "out_features") if linear else ("nx", "nf")
    setattr(module, sizes[0] if inputs else sizes[1], len(chosen))
