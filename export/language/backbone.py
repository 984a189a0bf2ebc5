"""Causal language models as Hugging Face directories. This module asks for ``transformers`` where it is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import nn

from edge.errors import Raw, UsageError
from edge.files import replaced_directory, write_durably
from export.errors import CheckpointError
from export.generate.files import INDEX, TOKENIZER_CONFIG, WEIGHTS
from export.generate.tokenizer import TextTokenizer
from export.training.runs import CONFIG, TOKENIZER

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedModel

#: Values of ``model_type`` in ``config.json``.
ARCHITECTURES = ("gpt2", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2")
_FIX = f"Give a model of {', '.join(ARCHITECTURES)} as transformers saves it, with safetensors."


def new_gpt2(vocabulary: int, dim: int, layers: int, heads: int, positions: int, *, end: int) -> GPT2LMHeadModel:
    """Return a model of GPT-2's architecture with random weights from torch's generator, without dropout.

    The embeddings are also the last layer's weights, as in GPT-2.

    Args:
        positions: the most tokens of a text.
        end: id of the token that ends a text.

    Raises:
        UsageError: transformers is not installed.
    """
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_embd=dim,
        n_layer=layers,
        n_head=heads,
        n_positions=positions,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
    )
    model: GPT2LMHeadModel = transformers.GPT2LMHeadModel(config)
    return model


def load_backbone(directory: str | Path) -> PreTrainedModel:
    """Return a model of one of :data:`ARCHITECTURES` in FP32 and evaluation mode; nothing is downloaded.

    Raises:
        CheckpointError: a file is missing or malformed, the architecture is another one, or weights are missing, of
            another shape or not finite.
        UsageError: transformers is not installed.
    """
    directory = Path(directory)
    architecture = _architecture(directory / CONFIG)
    if architecture not in ARCHITECTURES:
        subject = f"{directory / CONFIG} field model_type"
        raise CheckpointError(subject, given=architecture, expected=f"one of {', '.join(ARCHITECTURES)}", fix=_FIX)
    if not (directory / WEIGHTS).is_file() and not (directory / INDEX).is_file():
        raise _broken(directory, "no weights", f"{WEIGHTS} or {INDEX}")
    transformers = _transformers()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise _broken(directory, error, "a model that transformers loads") from None
    for name in sorted(found["missing_keys"]):
        raise _broken(directory, f"no weights {name}", "all weights that follow from config.json")
    for name, weights in model.named_parameters():
        if not torch.isfinite(weights).all():
            raise _broken(directory, f"NaN or Inf in {name}", "finite weights")
    loaded: PreTrainedModel = model.eval()
    return loaded


def save_backbone(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    directory: str | Path,
    further: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model with its tokenizer as a directory that transformers loads, too; one at that path is replaced.

    Args:
        further: contents by file name, to write beside it, or in place of a tokenizer's file; a name may have a
            directory.

    Raises:
        CheckpointError: the disk refuses.
    """
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions_of(model)}
    special |= {"eos_token": tokenizer.tokenizer.id_to_token(tokenizer.end)}
    contents = {
        TOKENIZER: tokenizer.tokenizer.to_str(pretty=True).encode(),
        TOKENIZER_CONFIG: json.dumps(special, indent=2).encode(),
        **(further or {}),
    }
    try:
        with replaced_directory(Path(directory)) as new:
            model.save_pretrained(new)
            for name, data in contents.items():
                (new / name).parent.mkdir(exist_ok=True)
                write_durably(new / name, data)
    except OSError as error:
        fix = "Free space, or choose another --out."
        raise CheckpointError(f"{directory}", given=Raw(error), expected="a writable place", fix=fix) from None


def positions_of(model: PreTrainedModel) -> int:
    """Return the most tokens of a text that a model was made for."""
    return int(model.config.max_position_embeddings)


def linear_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the linear layers of a model but the last, which makes the logits."""
    kinds = (nn.Linear, _transformers().pytorch_utils.Conv1D)
    last = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [module for module in model.modules() if isinstance(module, kinds) and module is not last]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        fix = "Install it with pip install 'fewheads[language]'."
        raise UsageError("transformers", given=Raw(error), expected="an importable package", fix=fix) from None
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()  # a file takes milliseconds, and a bar of ours is shown beside it
    return transformers


def _architecture(path: Path) -> object:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("model_type")
    except OSError as error:
        raise _broken(path, error.strerror, "the configuration of a Hugging Face model") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _broken(path, error, "JSON") from None


def _broken(path: Path, given: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}", given=Raw(given), expected=expected, fix=_FIX)
