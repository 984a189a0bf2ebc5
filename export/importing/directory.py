"""A fine-tuned Hugging Face directory as a model with a head: its kind, labels and weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from edge.bundles.steps import Labels
from edge.errors import Raw, UsageError
from export.data.tokens import load_tokenizer
from export.errors import CheckpointError
from export.finetune import EMBEDDING
from export.finetune.models import Architecture
from export.importing.embedder import MODULES, Embedder, read_embedder
from export.importing.image_processor import read_image_processor
from export.models.heads import SCORE, Activation, Embedding, Head
from export.models.huggingface import CONFIG, INDEX, PACK, SAVE_AGAIN, WEIGHTS, Pretrained, load_pretrained, read_json
from export.models.transformer import TransformerConfig

#: Activation behind the layer d -> d before the classifier of a sequence, by ``model_type``.
POOLERS: Mapping[str, Activation] = {
    "bert": "tanh",
    "roberta": "tanh",
    "xlm-roberta": "tanh",
    "mpnet": "tanh",
    "distilbert": "relu",
}
PROCESSOR = "preprocessor_config.json"
#: Where exporters put an ONNX file, which ``fewheads pack`` takes.
ONNX_FILES = ("onnx/model.onnx", "model.onnx")
SUPPORTED = (*POOLERS, "vit")
#: Task by the end of the class that saved a model.
KINDS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    # Without a head of a task: the mean of the last states, as sentence-transformers makes of such a directory.
    "ForMaskedLM": EMBEDDING,
    "ForPreTraining": EMBEDDING,
    "Model": EMBEDDING,
}
#: A tokenizer without a limit has a huge one.
_NO_LIMIT = 10**6


class ModelConfig(msgspec.Struct, frozen=True):
    """``config.json``.

    Attributes:
        architectures: the class of ``transformers`` that saved the model.
        auto_map: classes of Python files in the directory, which are never executed here.
    """

    model_type: str = ""
    architectures: tuple[str, ...] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    auto_map: dict[str, Any] | None = None


class TokenizerConfig(msgspec.Struct, frozen=True):
    """``tokenizer_config.json``; the length is a huge number where none was set."""

    model_max_length: float | None = None


class FineTuned(NamedTuple):
    """A model with the head of its directory; ``tokenizer`` is None for images."""

    architecture: Architecture
    model: Head
    tokenizer: Tokenizer | None


def read_directory(
    directory: Path, *, pair: bool = False, no_answer: bool = False, max_length: int | None = None
) -> FineTuned:
    """Read a model with a head for sequences, tokens, spans or images, or a directory of sentence-transformers.

    A pretrained encoder without a head becomes an embedder of the mean of its last states.

    Args:
        pair: whether it reads two texts together, which its files do not say.
        no_answer: whether it says where a context has no answer, which they do not say either.
        max_length: most tokens of an input; None takes the limit of the directory.

    Raises:
        CheckpointError: a file is missing or malformed, or the architecture, the head or a module is not supported.
        UsageError: ``pair``, ``no_answer`` or ``max_length`` does not fit the model.
    """
    embedder = read_embedder(directory) if (directory / MODULES).exists() else None
    place = directory if embedder is None else embedder.transformer
    config = read_json(place / CONFIG, ModelConfig, SAVE_AGAIN)
    _check_supported(place, config)
    _check_weights(place)
    kind = EMBEDDING if embedder else _kind(place, config)
    if pair and kind != "text-classification":
        expected = "a classifier or regression of texts"
        raise UsageError("--pair", given=Raw(f"{kind} in {directory}"), expected=expected, fix="Leave it out.")
    if no_answer and kind != "question-answering":
        given, expected = Raw(f"{kind} in {directory}"), "a model that answers questions"
        raise UsageError("--no-answer", given=given, expected=expected, fix="Leave it out.")
    pretrained = load_pretrained(place)
    transformer = pretrained.transformer.config
    per_token = kind == "token-classification"
    is_vit = transformer.architecture == "vit"
    if is_vit and max_length is not None:
        fix = "Leave it out."
        raise UsageError("--max-length", given=max_length, expected="a model of texts", fix=fix)
    if is_vit != (kind == "image-classification"):
        raise _broken(f"{place / CONFIG} field architectures", list(config.architectures or ()), "a class of its type")
    architecture = Architecture(
        task=kind,
        transformer=transformer,
        labels=(
            () if kind in ("question-answering", EMBEDDING) else _labels(place, config, pretrained, per_token=per_token)
        ),
        pooling=embedder.pooling if embedder else "mean" if kind == EMBEDDING else "summary",
        max_length=transformer.max_positions if is_vit else _max_length(place, transformer, embedder, max_length),
        pooler=POOLERS[config.model_type] if kind == "text-classification" else None,
        per_token=per_token,
        embedding=embedder.embedding if embedder else Embedding() if kind == EMBEDDING else None,
        pair=pair or kind == "question-answering",
        no_answer=no_answer,
        image=read_image_processor(place / PROCESSOR, transformer.image_size, transformer.channels) if is_vit else None,
    )
    model = architecture.create(pretrained.transformer).eval()
    _load_head(place, model, pretrained, embedder)
    return FineTuned(architecture, model, None if is_vit else _tokenizer(place, transformer))


def _check_supported(place: Path, config: ModelConfig) -> None:
    if config.model_type not in SUPPORTED:
        expected = f"one of {', '.join(SUPPORTED)}"
        subject, given = f"{place / CONFIG} field model_type", config.model_type or Raw("nothing")
        raise CheckpointError(subject, given=given, expected=expected, fix=_pack(place))
    if config.auto_map:
        given, expected = Raw(f"code of its own, {', '.join(config.auto_map)}"), "a model without code"
        fix = f"Code of a model is never executed here. {_pack(place)}"
        raise CheckpointError(f"{place / CONFIG} field auto_map", given=given, expected=expected, fix=fix)


def _pack(place: Path) -> str:
    """Return the way out for a model that is not supported here."""
    if any((place / name).is_file() for name in ONNX_FILES):
        return f"Make a bundle of its ONNX file with 'fewheads pack {place} --name NAME --repository DIR'."
    return PACK


def _check_weights(place: Path) -> None:
    pickled = sorted(path.name for path in place.glob("*.bin"))
    if pickled and not (place / WEIGHTS).exists() and not (place / INDEX).exists():
        fix = "Load the model with transformers, and save it with save_pretrained: a pickle can execute anything."
        raise CheckpointError(f"{place}", given=Raw(f"only {pickled[0]}"), expected=WEIGHTS, fix=fix)


def _kind(place: Path, config: ModelConfig) -> str:
    found = config.architectures or ()
    for ending, kind in KINDS.items():
        if len(found) == 1 and found[0].endswith(ending):
            return kind
    given = Raw(", ".join(found) or "nothing")
    expected = f"one class that ends with {' or '.join(KINDS)}, or {MODULES} of sentence-transformers"
    fix = "Give such a directory, or fine-tune the model first: fewheads finetune TASK --model DIR."
    raise CheckpointError(f"{place / CONFIG} field architectures", given=given, expected=expected, fix=fix)


def _labels(place: Path, config: ModelConfig, pretrained: Pretrained, *, per_token: bool) -> tuple[str, ...]:
    """Return the labels in the order of the classifier's rows; one row for a whole input is a score."""
    rows = 0 if pretrained.classifier is None else pretrained.classifier.out_features
    if config.problem_type == "multi_label_classification" or (config.problem_type == "regression" and rows > 1):
        given, expected = Raw(f"{config.problem_type} of {rows} outputs"), "one label or score for each input"
        raise CheckpointError(f"{place / CONFIG} field problem_type", given=given, expected=expected, fix=PACK)
    found = config.id2label or {number: f"LABEL_{number}" for number in range(rows)}
    if sorted(found) != list(range(rows)):
        given, expected = Raw(f"{len(found)} labels"), f"one for each of the {rows} rows of the classifier"
        raise _broken(f"{place / CONFIG} field id2label", given, expected)
    if rows == 1 and not per_token:
        return (SCORE,)
    try:
        # Without a classifier there are none, which the copy of its weights reports.
        return msgspec.convert([found[number] for number in range(rows)], Labels) if rows else ()
    except msgspec.ValidationError as error:
        subject, expected = f"{place / CONFIG} field id2label", "2 to 4096 short texts, as a bundle holds"
        raise CheckpointError(subject, given=Raw(error), expected=expected, fix=PACK) from None


def _max_length(place: Path, transformer: TransformerConfig, embedder: Embedder | None, wanted: int | None) -> int:
    most = transformer.max_positions
    if wanted is not None:
        if wanted > most:
            fix = "Give a smaller one, or leave it out."
            raise UsageError("--max-length", given=wanted, expected=f"at most {most}, the model's positions", fix=fix)
        return wanted
    limits = [most, embedder.max_length if embedder else None, tokenizer_limit(place)]
    return min(limit for limit in limits if limit)


def tokenizer_limit(directory: Path) -> int | None:
    """Return the most tokens of a text that ``tokenizer_config.json`` states, if any; errors as :func:`read_json`."""
    path = directory / "tokenizer_config.json"
    limit = read_json(path, TokenizerConfig, SAVE_AGAIN).model_max_length if path.exists() else None
    return int(limit) if limit and limit < _NO_LIMIT else None


def _tokenizer(place: Path, transformer: TransformerConfig) -> Tokenizer:
    tokenizer = load_tokenizer(place)
    if tokenizer.get_vocab_size() > transformer.vocab_size:
        given, expected = Raw(f"{tokenizer.get_vocab_size()} tokens"), f"at most {transformer.vocab_size}"
        raise _broken(f"{place / 'tokenizer.json'}", given, f"{expected}, the vocab_size of the model")
    return tokenizer


#: The layers of heads in messages.
_LAYERS = {"classifier": "the classifier", "pooler": "the pooler before the classifier"}


def _load_head(place: Path, model: Head, pretrained: Pretrained, embedder: Embedder | None) -> None:
    """Copy the weights behind the transformer; raise a CheckpointError if the files lack some, a bias, or some rows."""
    stored = {name: layer.state_dict() for name in _LAYERS if (layer := getattr(pretrained, name)) is not None}
    stored |= {f"dense.{number}": weights for number, weights in enumerate(embedder.weights if embedder else ())}
    for name, layer in model.layers.items():
        found = stored.get(name, {})
        if _shapes(found) != _shapes(layer.state_dict()):
            given = f"{list(found['weight'].shape)}, bias {'bias' in found}" if found else "none"
            wanted = f"{list(layer.weight.shape)} with a bias"
            raise _broken(f"{place} tensors of {_LAYERS.get(name, name)}", Raw(given), wanted)
        layer.load_state_dict(found)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _broken(subject: str, given: object, expected: str) -> CheckpointError:
    fix = "Save the fine-tuned model again with save_pretrained."
    return CheckpointError(subject, given=given, expected=expected, fix=fix)
