"""Copies of a frozen language model to train themselves: with LoRA, or all weights. ``peft`` is imported here alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from edge.errors import Literally, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The layers that make queries, keys and values, by ``model_type``; GPT-2 has one for all three.
_LAYERS = {"gpt2": ["c_attn"]}
_OTHERS = ["q_proj", "k_proj", "v_proj"]


def unfrozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model, all of whose weights train."""
    return copy.deepcopy(model).requires_grad_(True)


def with_lora(model: PreTrainedModel, rank: int, seed: int) -> PreTrainedModel:
    """Return a copy of a model with adapters of low rank on queries, keys and values, which alone train.

    The update is B A h, without a factor, after Hu et al. 2021, arXiv 2106.09685.

    Raises:
        UsageError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        fix = "Install it with pip install 'fewheads[language]'."
        raise UsageError("peft", given=Literally(error), expected="an importable package", fix=fix) from None
    kind = str(model.config.model_type)
    config: Any = peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules=_LAYERS.get(kind, _OTHERS), fan_in_fan_out=kind in _LAYERS
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted: PreTrainedModel = peft.inject_adapter_in_model(config, copy.deepcopy(model))  # type: ignore[assignment]
    return adapted


def trainable(model: torch.nn.Module) -> int:
    """Return the number of parameters that train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
