"""Copies of a frozen language model to train themselves: with LoRA, or all weights. ``peft`` is imported here alone."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from edge.errors import Raw, UsageError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: The layers that make queries, keys and values, by ``model_type``; GPT-2 has one for all three.
_LAYERS = {"gpt2": ["c_attn"]}
_OTHERS = ["q_proj", "k_proj", "v_proj"]
#: The files of an adapter in peft's format.
_FILES = ("adapter_config.json", "adapter_model.safetensors")


def unfrozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model, all of whose weights train."""
    return copy.deepcopy(model).requires_grad_(True)


def with_lora(
    model: PreTrainedModel, rank: int, seed: int, layers: Literal["attention", "linear"] = "attention"
) -> PeftModel:
    """Return a copy of a model with adapters of low rank, which alone train.

    The update is B A h, without a factor, after Hu et al. 2021, arXiv 2106.09685.

    Args:
        layers: those with an adapter, the queries, keys and values, or all linear layers but the last.

    Raises:
        UsageError: peft is not installed.
    """
    peft = _peft()
    kind = str(model.config.model_type)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rank,
        target_modules="all-linear" if layers == "linear" else _LAYERS.get(kind, _OTHERS),
        fan_in_fan_out=kind in _LAYERS,
    )
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        adapted: PeftModel = peft.get_peft_model(copy.deepcopy(model), config)
    return adapted


def moved(adapted: PeftModel, model: PreTrainedModel) -> PeftModel:
    """Return a copy of a model with the adapters of another, which has layers of the same shapes."""
    peft = _peft()
    with torch.random.fork_rng(devices=[]), _quiet():
        other: PeftModel = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(adapted.peft_config["default"]))
        peft.set_peft_model_state_dict(other, peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    return other.eval()


def merged(adapted: PeftModel) -> PreTrainedModel:
    """Return a plain copy of a model whose weights contain its adapters."""
    untyped: Any = copy.deepcopy(adapted)
    return cast("PreTrainedModel", untyped.merge_and_unload())


def adapter_files(adapted: PeftModel) -> dict[str, bytes]:
    """Return the adapters of a model by file name, in peft's format."""
    with tempfile.TemporaryDirectory() as directory:
        adapted.save_pretrained(directory, save_embedding_layers=False)
        return {name: (Path(directory) / name).read_bytes() for name in _FILES}


def trainable(model: torch.nn.Module) -> int:
    """Return the number of parameters that train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        fix = "Install it with pip install 'fewheads[language]'."
        raise UsageError("peft", given=Raw(error), expected="an importable package", fix=fix) from None
    return peft


@contextmanager
def _quiet() -> Iterator[None]:
    # peft reads an attribute of models that transformers renames.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
