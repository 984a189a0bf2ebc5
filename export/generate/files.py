"""The files of a language model's directory: those of Hugging Face, and the records of its training. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from edge.errors import Raw
from export.bundle.outputs import Inputs, check_directory
from export.errors import CheckpointError
from export.training.runs import CONFIG, LOG, METRICS, TOKENIZER

WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
#: The record of a training, a :class:`export.training.runs.RunConfig`.
TRAINING = "training.json"
#: Directory of the adapter that a fine-tuned model was merged with, in the format of the package peft.
ADAPTER = "adapter"
_ALL = {CONFIG, WEIGHTS, GENERATION, TOKENIZER, TOKENIZER_CONFIG, TRAINING, METRICS, LOG}
#: Files of a tokenizer as transformers saves it, patterns below its directory.
_OF_TOKENIZER = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_OPTIONAL = {ADAPTER, *(Path(pattern).parts[0] for pattern in _OF_TOKENIZER)} - _ALL


def is_language_model(directory: Path) -> bool:
    """Return whether a directory is one of ``fewheads language train``, ``finetune`` or ``reduce``, without more."""
    return directory.is_dir() and ({entry.name for entry in directory.iterdir()} | {LOG}) - _OPTIONAL == _ALL


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files by name, chat templates too, for models that are made from it.

    Raises:
        CheckpointError: one cannot be read.
    """
    paths = [path for pattern in _OF_TOKENIZER for path in directory.glob(pattern)]
    try:
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    except OSError as error:
        given, fix = Raw(error.strerror), "Give a model as transformers saves it."
        raise CheckpointError(f"{error.filename}", given=given, expected="a file that can be read", fix=fix) from None


def check_language_model(option: str, directory: Path, inputs: Inputs, *, replace: bool) -> None:
    """Check the path of a new language model.

    Raises:
        UsageError: it overlaps an input, cannot be written, holds an earlier model and ``replace`` is not set, or holds
            something else.
    """
    check_directory(
        option, directory, inputs, is_language_model, "model of fewheads language", replace, "another --out"
    )
