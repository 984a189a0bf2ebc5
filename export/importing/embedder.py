"""Directories of sentence-transformers: a transformer, its pooling and layers behind it, listed in ``modules.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from edge.errors import Raw
from export.errors import CheckpointError
from export.models.heads import Activation, DenseShape, Embedding, Pooling
from export.models.huggingface import PACK, SAVE_AGAIN, read_json

MODULES = "modules.json"
_LIST = "Transformer, Pooling, any number of Dense, and at most one Normalize"
_FIRST = ("Transformer", "Pooling")
_POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "cls": "summary"}
_OLD_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu"}


class Embedder(NamedTuple):
    """What a directory of sentence-transformers says.

    Attributes:
        transformer: directory of the Hugging Face model.
        weights: of each dense layer, for :class:`torch.nn.Linear`.
        max_length: most tokens of a text; None without a limit of its own.
    """

    transformer: Path
    pooling: Pooling
    embedding: Embedding
    weights: tuple[dict[str, Tensor], ...]
    max_length: int | None


class _Module(msgspec.Struct):
    path: str
    type: str

    @property
    def kind(self) -> str:
        """The name of the class, whose package has changed with the versions."""
        return self.type.rpartition(".")[2]


class _Library(msgspec.Struct):
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


class _Transformer(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _Dense(msgspec.Struct):
    in_features: int
    out_features: int
    activation_function: str
    bias: bool = True


def read_embedder(directory: Path) -> Embedder | None:
    """Read a directory with ``modules.json``; None for a cross-encoder. A CheckpointError refuses other modules."""
    path = directory / MODULES
    modules = read_json(path, list[_Module], SAVE_AGAIN)
    kinds = [module.kind for module in modules]
    if kinds == ["Transformer"]:
        return None
    dense = kinds.count("Dense")
    if kinds not in ([*_FIRST, *["Dense"] * dense], [*_FIRST, *["Dense"] * dense, "Normalize"]):
        raise CheckpointError(f"{path}", given=Raw(", ".join(kinds)), expected=_LIST, fix=PACK)
    if any(".." in Path(module.path).parts or Path(module.path).is_absolute() for module in modules):
        expected = "paths inside of the directory"
        raise CheckpointError(f"{path}", given=[module.path for module in modules], expected=expected, fix=PACK)
    _check_prompts(directory)
    transformer = directory / modules[0].path
    settings = transformer / "sentence_bert_config.json"
    limits = read_json(settings, _Transformer, SAVE_AGAIN) if settings.exists() else _Transformer()
    if limits.do_lower_case:
        expected = "False: the tokenizer decides on lower case"
        raise CheckpointError(f"{settings} field do_lower_case", given=True, expected=expected, fix=PACK)
    layers = [_dense(directory / module.path) for module in modules if module.kind == "Dense"]
    embedding = Embedding(tuple(shape for shape, _ in layers), kinds[-1] == "Normalize")
    pooling = _pooling(directory / modules[1].path / "config.json")
    return Embedder(transformer, pooling, embedding, tuple(found for _, found in layers), limits.max_seq_length)


def _check_prompts(directory: Path) -> None:
    """Refuse a text that the library would put before every other one unasked."""
    path = directory / "config_sentence_transformers.json"
    found = read_json(path, _Library, SAVE_AGAIN) if path.exists() else _Library()
    if found.default_prompt_name and found.prompts.get(found.default_prompt_name):
        fix = "Set it to null, and send texts with the prompt before them."
        given, expected = found.default_prompt_name, "null: a served model gets texts as they are"
        raise CheckpointError(f"{path} field default_prompt_name", given=given, expected=expected, fix=fix)


def _pooling(path: Path) -> Pooling:
    """Return the pooling; until version 5 of the library, each way had a field of its own."""
    fields = read_json(path, dict[str, object], SAVE_AGAIN)
    chosen = [name for name, on in fields.items() if name.startswith("pooling_mode_") and on]
    chosen = [str(fields["pooling_mode"])] if "pooling_mode" in fields else chosen
    chosen = [_OLD_POOLINGS.get(name, name) for name in chosen]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        given, expected = Raw(" and ".join(chosen) or "nothing"), f"one of {', '.join(_POOLINGS)}"
        raise CheckpointError(f"{path} field pooling_mode", given=given, expected=expected, fix=PACK)
    return _POOLINGS[chosen[0]]


def _dense(path: Path) -> tuple[DenseShape, dict[str, Tensor]]:
    config = read_json(path / "config.json", _Dense, SAVE_AGAIN)
    activation = config.activation_function.rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        subject, expected = f"{path / 'config.json'} field activation_function", f"one of {', '.join(_ACTIVATIONS)}"
        raise CheckpointError(subject, given=config.activation_function, expected=expected, fix=PACK)
    shape = DenseShape(config.out_features, _ACTIVATIONS[activation], config.bias)
    return shape, _linear(path / "model.safetensors", config)


def _linear(path: Path, config: _Dense) -> dict[str, Tensor]:
    wanted = {"weight": [config.out_features, config.in_features]}
    if config.bias:
        wanted["bias"] = [config.out_features]
    fix = "Save the model again with sentence-transformers, in the safetensors format."
    try:
        stored = safetensors.torch.load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}", given=Raw(error), expected="a safetensors file", fix=fix) from None
    found = {name.removeprefix("linear."): tensor for name, tensor in stored.items()}
    shapes = {name: list(tensor.shape) for name, tensor in found.items()}
    if shapes != wanted:
        raise CheckpointError(f"{path} tensors", given=shapes, expected=str(wanted), fix=fix)
    return {name: tensor.float() for name, tensor in found.items()}
