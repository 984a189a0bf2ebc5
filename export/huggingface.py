"""Hugging Face model directories, ``config.json`` and safetensors, as :class:`export.models.transformer.Transformer`.

BERT (MiniLM is one), RoBERTa, XLM-RoBERTa, DistilBERT, ViT and GPT-2. The fields, and the name and shape of every
tensor, are checked before the first weight is read. The package ``transformers`` is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from edge.bundles.fields import FileName
from edge.errors import Raw
from export.errors import CheckpointError
from export.models.huggingface import CLASSIFIERS, IGNORED, NAMES, OLD_ENDS, POOLERS, Names, Source
from export.models.transformer import Transformer, TransformerConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_FIX = "Download the model again, or give one of BERT, RoBERTa, DistilBERT, ViT or GPT-2 in the safetensors format."
#: Types of weights as safetensors names them; all become FP32.
_FLOATS = ("F64", "F32", "F16", "BF16")


class Pretrained(NamedTuple):
    """Contents of a Hugging Face directory.

    Attributes:
        transformer: the model without a head, in FP32 and evaluation mode.
        pooler: the layer d -> d over the first token, before its activation; None if there is none.
        classifier: the head of a fine-tuned model, d -> labels; None if there is none.
    """

    transformer: Transformer
    pooler: nn.Linear | None
    classifier: nn.Linear | None


class _Stored(NamedTuple):
    path: Path
    name: str
    datatype: str
    shape: list[int]


class _Index(msgspec.Struct):
    weight_map: dict[str, FileName]


def load_pretrained(directory: str | Path) -> Pretrained:
    """Read a model.

    Args:
        directory: holds ``config.json`` and ``model.safetensors``, or an index and the files that it names.

    Raises:
        CheckpointError: a file is missing or malformed; the architecture is unknown, or a variant that is not computed
            here; heads do not divide the width; a tensor is missing, unknown, of another shape or not finite.
    """
    directory = Path(directory)
    config, names = _read_config(directory / CONFIG)
    stored = _stored(directory, names)
    with torch.device("meta"):  # shapes without memory
        transformer = Transformer(config)
        heads = _heads(stored, config.dim)
    wanted = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    sources = names.sources(wanted)
    shapes = {source.name: source.shape(wanted[name]) for name, source in sources.items()}
    for path, head in heads.items():
        shapes |= {f"{path}.{name}": list(tensor.shape) for name, tensor in head.state_dict().items()}
    _check(directory, stored, shapes)
    transformer.load_state_dict(
        {name: _tensor(stored[source.name], source) for name, source in sources.items()}, assign=True
    )
    for path, head in heads.items():
        weights = {name: _tensor(stored[f"{path}.{name}"], Source(name)) for name in head.state_dict()}
        head.load_state_dict(weights, assign=True)
    pooler, classifier = (
        next((heads[path] for path in paths if path in heads), None) for paths in (POOLERS, CLASSIFIERS)
    )
    return Pretrained(transformer.eval(), pooler, classifier)


def _read_config(path: Path) -> tuple[TransformerConfig, Names]:
    data = _read(path)
    fields = _decode(path, data, dict[str, Any])
    architecture = fields.get("model_type")
    if architecture not in NAMES:
        raise _broken(f"{path} field model_type", architecture, f"one of {', '.join(NAMES)}")
    names = NAMES[architecture]
    for field, only in names.required.items():
        if fields.get(field, only) != only:
            raise _broken(f"{path} field {field}", fields[field], f"{only}, the only variant that is supported")
    config = _decode(path, data, names.fields).config()
    if config.dim % config.layers[0].num_heads:
        expected = f"a divisor of {names.dim}, {config.dim}"
        raise _broken(f"{path} field {names.heads}", config.layers[0].num_heads, expected)
    if config.architecture == "vit" and config.image_size % config.patch_size:
        raise _broken(f"{path} field patch_size", config.patch_size, f"a divisor of image_size, {config.image_size}")
    return config, names


def _stored(directory: Path, names: Names) -> dict[str, _Stored]:
    """Return the tensors of the files by today's names without prefix; buffers and unused heads are left out."""
    files = [WEIGHTS]
    if (directory / INDEX).exists():
        index = _decode(directory / INDEX, _read(directory / INDEX), _Index)
        files = sorted(set(index.weight_map.values()))
    found = {}
    for tensor in (tensor for file in files for tensor in _tensors_of(directory / file)):
        name = tensor.name.removeprefix(names.prefix)
        for old, new in OLD_ENDS.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if not IGNORED.fullmatch(name):
            found[name] = tensor
    return found


def _tensors_of(path: Path) -> Iterator[_Stored]:
    if not path.is_file():
        raise _broken(str(path), Raw("nothing there"), "a file")
    try:
        with safe_open(path, "pt") as file:  # reads the header only
            for name in file.keys():  # noqa: SIM118 - it is not a dictionary
                part = file.get_slice(name)
                yield _Stored(path, name, part.get_dtype(), part.get_shape())
    except (SafetensorError, OSError) as error:
        raise _broken(str(path), Raw(error), "a safetensors file") from None


def _heads(stored: Mapping[str, _Stored], dim: int) -> dict[str, nn.Linear]:
    """Return the heads in the files, d -> rows of the stored weight, and d -> d for a pooler."""
    found = {}
    for path in (*POOLERS, *CLASSIFIERS):
        if f"{path}.weight" in stored:
            rows = dim if path in POOLERS else next(iter(stored[f"{path}.weight"].shape), 0)
            found[path] = nn.Linear(dim, rows, bias=f"{path}.bias" in stored)
    return found


def _check(directory: Path, stored: Mapping[str, _Stored], shapes: Mapping[str, list[int]]) -> None:
    for name in sorted(stored.keys() ^ shapes.keys()):
        given = "a tensor that this architecture lacks" if name in stored else "no such tensor"
        raise _broken(f"{directory} tensor {name!r}", Raw(given), "the tensors that follow from config.json")
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.shape != shape or tensor.datatype not in _FLOATS:
            given = Raw(f"{tensor.datatype} {tensor.shape}")
            raise _broken(f"{tensor.path} tensor {tensor.name!r}", given, f"{shape} of {', '.join(_FLOATS)}")


def _tensor(stored: _Stored, source: Source) -> Tensor:
    with safe_open(stored.path, "pt") as file:
        tensor = source.ours(file.get_tensor(stored.name))
    if not torch.isfinite(tensor).all():
        raise _broken(f"{stored.path} tensor {stored.name!r}", Raw("NaN or Inf"), "finite weights")
    return tensor


def _decode(path: Path, data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise _broken(str(path), Raw(error), "the JSON of a Hugging Face model") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _broken(str(path), Raw(error.strerror), "a file") from None


def _broken(subject: str, given: object, expected: str) -> CheckpointError:
    return CheckpointError(subject, given=given, expected=expected, fix=_FIX)
