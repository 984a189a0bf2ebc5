"""A causal language model of Hugging Face's transformers as one graph for prompts and single tokens.

The graph reads keys and values of earlier tokens and returns those of the new ones, so that a device can keep them
where they are. The architecture is the library's. Only its attention is replaced, by one that never copies the cache:
scores of earlier and of new tokens are computed apart, and share one softmax.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.generate.model import read_out_of, softcapped
from export.generate.sublayers import drop_removed, layers_of
from export.models.convert import to_onnx

TOKENS, LENGTHS, LAST, LOGITS = "tokens", "lengths", "last", "logits"
#: Name of the attention in the library's registry.
_NAME = "fewheads"
_NEVER = -3e4  # added to the scores of hidden tokens; FP16 has it, and a softmax makes 0 of it


class DecoderGraph(nn.Module):
    """A decoder, or a block of its layers: logits of each row's last token, and new keys and values.

    A block before the last one computes hidden states in place of logits, which the next one reads in place of tokens.

    Args:
        model: of :data:`export.generate.model.ARCHITECTURES`. It loses the heads and neurons that a reduction
            removed, and its attention is replaced.

    Attributes:
        layers: those of the model that the graph has.
        key_heads: of keys and values, in each of them.
        heads_per_key: heads of queries that share one of keys.
        reads, gives: the names of its first input and its first output.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        _register()
        model.set_attn_implementation(_NAME)
        self.model = model.eval()
        config = model.config.get_text_config()
        self.key_heads = drop_removed(model)
        self.layers = range(len(self.key_heads))
        self.reads, self.gives = TOKENS, LOGITS
        heads = config.num_attention_heads
        self.heads_per_key = int(heads // getattr(config, "num_key_value_heads", heads))  # GPT-2 has no such field
        base = model.base_model
        name = "ln_f" if hasattr(base, "ln_f") else "norm"
        self._last_norm = _Postponed(getattr(base, name))  # it reads only one token of each row
        setattr(base, name, self._last_norm)
        self.states = int(config.hidden_size)
        self.width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def blocks(self, most: int) -> list[DecoderGraph]:
        """Return the decoder in blocks of at most so many layers, which share its weights."""
        base, count = self.model.base_model, len(self.layers)
        name = "h" if hasattr(base, "h") else "layers"
        blocks = []
        for first in range(0, count, most):
            layers = nn.ModuleList([*[_Earlier()] * first, *layers_of(self.model)[first : first + most]])
            of_block = _replaced(base, **{name: layers})
            block = _replaced(self, model=_replaced(self.model, **{self.model.base_model_prefix: of_block}))
            block.layers = self.layers[first : first + most]
            block.key_heads = self.key_heads[first : first + most]
            block.reads = f"hidden.{first}" if first else TOKENS
            block.gives = f"hidden.{first + most}" if first + most < count else LOGITS
            blocks.append(block)
        return blocks

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its inputs with a number for each row."""
        return (LENGTHS, LAST) if self.gives == LOGITS else (LENGTHS,)

    def caches(self) -> list[tuple[str, str, int]]:
        """Return for keys and values of each layer the names as :func:`cache_names`, and the number of heads."""
        names = cache_names(self.layers)
        return [(*pair, heads) for pair, heads in zip(names, np.repeat(self.key_heads, 2).tolist(), strict=True)]

    def forward(self, tokens: Tensor, lengths: Tensor, last: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Return logits [N, V] and the entries of the cache for the new tokens, keys and values of each layer in turn.

        A block before the last one returns states [N, T, E] in place of logits.

        Args:
            tokens: [N, T] int64; of a later block, the states of the block before.
            lengths: of the cache, [N, 1] int64; its places from there on are ignored.
            last: index of each row's last token, [N, 1] int64; what follows it has no effect on the logits. A block
                before the last one has ``past`` from here on.
            past: keys and values of each layer in turn, [N, its heads, L, width].
        """
        if self.gives != LOGITS:
            past = (last, *past)
        places = torch.arange(tokens.shape[1])  # [T]
        cache = _Cache(past, lengths, places, self.layers.start, tokens)
        hidden = self.model.base_model(
            **{"input_ids" if self.reads == TOKENS else "inputs_embeds": tokens},
            position_ids=lengths + places,
            use_cache=False,
            fewheads_cache=cache,
        ).last_hidden_state
        if self.gives != LOGITS:
            return (hidden, *cache.new)
        at_last = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[2]))[:, 0]  # [N, E]
        return (read_out_of(self.model).logits(self._last_norm.module(at_last)), *cache.new)


def cache_names(layers: range) -> list[tuple[str, str]]:
    """Return the names of the cache of some layers: of each input, and of the output with its new entries."""
    return [(f"past.{layer}.{kind}", f"new.{layer}.{kind}") for layer in layers for kind in ("key", "value")]


def decoder_onnx(graph: DecoderGraph) -> bytes:
    """Return the ONNX model, with dynamic rows, tokens and places."""
    rows, tokens, places = 2, 3, 5
    caches = graph.caches()
    sequence = torch.ones(rows, tokens, dtype=torch.int64)
    states = torch.ones(rows, tokens, graph.states)
    inputs = {
        graph.reads: sequence if graph.reads == TOKENS else states,
        **{name: torch.full((rows, 1), 2) for name in graph.columns},
    }
    inputs |= {past: torch.zeros(rows, heads, places, graph.width) for past, _, heads in caches}
    dynamic = {graph.reads: {0: "batch", 1: "tokens"}, **{name: {0: "batch"} for name in graph.columns}}
    dynamic |= {past: {0: "batch", 2: "places"} for past, _, _ in caches}
    outputs = [graph.gives, *(new for _, new, _ in caches)]
    return to_onnx(graph, inputs, outputs, dynamic, variadic=len(inputs) - 3)


def _replaced(module: Any, **children: nn.Module) -> Any:
    """Return a module with the same weights, and others in place of some of its children."""
    new = copy.copy(module)
    new._modules = {**module._modules, **children}
    return new


class _Earlier(nn.Module):
    """Takes the place of a layer of an earlier block, and returns the states that this block has computed."""

    def forward(self, x: Tensor, *_: Any, fewheads_cache: _Cache, **__: Any) -> Tensor:
        return fewheads_cache.given


class _Postponed(nn.Module):
    """Takes the place of a module that is called later."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Cache:
    """What the layers from ``first`` on read of earlier tokens, and leave of those that are ``given``."""

    def __init__(self, past: Sequence[Tensor], lengths: Tensor, places: Tensor, first: int, given: Tensor) -> None:
        self.past, self.new = past, list[Tensor]()
        self.first, self.given = first, given
        self._lengths, self._places = lengths, places
        self._masks: dict[int | None, tuple[Tensor, Tensor]] = {}

    def masks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return what is added to the scores of earlier tokens, [N, 1, T, L], and to those of new ones, [N, 1, T, T].

        All layers with the same window share them.
        """
        if window not in self._masks:
            rows, tokens = self._lengths.shape[0], self._places.shape[0]
            earlier = torch.arange(self.past[0].shape[2])  # [L]
            later = (earlier >= self._lengths)[:, None, None, :]  # [N, 1, 1, L]
            distance = self._places[:, None] - self._places  # [T, T]
            unseen = distance < 0
            if window is not None:
                ago = (self._lengths + self._places)[:, None, :, None] - earlier  # [N, 1, T, L]
                later, unseen = later | (ago >= window), unseen | (distance >= window)
            hidden = later.expand(-1, -1, tokens, -1), unseen.expand(rows, 1, -1, -1)
            dtype = self.past[0].dtype
            self._masks[window] = hidden[0].to(dtype) * _NEVER, hidden[1].to(dtype) * _NEVER
        return self._masks[window]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    fewheads_cache: _Cache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from new tokens [N, H, T, d] to earlier and new ones [N, G, L or T, d]; H / G heads share one key."""
    layer: Any = module.layer_idx
    place = 2 * (layer - fewheads_cache.first)
    fewheads_cache.new += (key, value)
    past_key, past_value = fewheads_cache.past[place : place + 2]
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    scaled = query * (width**-0.5 if scaling is None else scaling)
    shared = scaled.reshape(rows, groups, heads // groups * tokens, width)
    scores = []
    for keys, mask in zip((past_key, key), fewheads_cache.masks(sliding_window), strict=True):
        score = softcapped(shared @ keys.transpose(2, 3), softcap)
        scores.append(score.reshape(rows, heads, tokens, keys.shape[2]) + mask)
    weights = torch.cat(scores, dim=3).softmax(dim=3)
    places = past_key.shape[2]
    seen = [
        share.reshape(rows, groups, heads // groups * tokens, values.shape[2]) @ values
        for values, share in ((past_value, weights[..., :places]), (value, weights[..., places:]))
    ]
    return (seen[0] + seen[1]).reshape(rows, heads, tokens, width).transpose(1, 2), None


def _register() -> None:
    """Add the attention to transformers' registry, without a mask of the library's own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
