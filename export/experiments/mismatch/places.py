"""Places of tokens in a text, which the positional embeddings of a model are for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def moved_back(model: PreTrainedModel, places: int) -> Iterator[None]:
    """Give each token of a text the place of one so many before it during the block; the first ones share the first.

    So tokens that are put before a text leave the places of its own tokens as they were.
    """

    def move(_: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids: Tensor = inputs[0] if inputs else options["input_ids"]
        given = options.get("position_ids")
        if given is None:
            given = torch.arange(ids.shape[1], device=ids.device)[None]
            # Without a mask, transformers takes places that do not rise for several texts.
            options = {**options, "attention_mask": torch.ones_like(ids)}
        return inputs, {**options, "position_ids": (given - places).clamp(min=0)}

    # Generation needs the places in the cache of the whole model, so only the layers below see others; a model with
    # adapters is a wrapper of a plain one.
    untyped: Any = model
    plain = untyped.get_base_model() if hasattr(untyped, "get_base_model") else untyped
    layers: nn.Module = plain.base_model
    hook = layers.register_forward_pre_hook(move, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
