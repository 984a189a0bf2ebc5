"""Comparison of an imported model with what the packages transformers and sentence-transformers compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from edge.bundles.image import ImagePreprocessor
from edge.datatypes import Array
from edge.errors import FewheadsError, GoldenError, Raw
from export.data.examples import Examples
from export.data.tokens import encode
from export.data.unlabelled import sample_texts
from export.finetune.objectives import outputs_by_row
from export.importing.directory import FineTuned
from export.importing.image_processor import sample_images
from export.models.heads import SentenceEmbedder, SpanClassifier
from export.models.huggingface import PACK

#: Largest difference of outputs, relative to their largest value.
_ALLOWED = 1e-3
_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
}


class Parity(msgspec.Struct, frozen=True):
    """Agreement with another implementation.

    Attributes:
        library: with its version.
        largest_difference: absolute, of all outputs for generated texts or images.
    """

    library: str
    largest_difference: float


def missing_library(found: FineTuned) -> str | None:
    """Return the package that :func:`check_parity` needs and that is not installed; None if it can compare."""
    needed = "sentence-transformers" if isinstance(found.model, SentenceEmbedder) else "transformers"
    return None if find_spec(needed.replace("-", "_")) else needed


def check_parity(directory: Path, found: FineTuned) -> Parity:
    """Compute sentences or images of ours with both implementations, and compare all outputs.

    The texts pass through the tokenizer of each, and images through the processor of each.

    Raises:
        GoldenError: the outputs differ, or the package cannot read the directory.
    """
    if found.architecture.image is not None:
        library, compute = "transformers", _images
    elif isinstance(found.model, SentenceEmbedder):
        library, compute = "sentence-transformers", _embeddings
    else:
        library, compute = "transformers", _texts
    try:
        pairs = compute(directory, found)
    except FewheadsError:
        raise
    except Exception as error:  # the packages raise many types
        given = Raw(f"{type(error).__name__}: {error}".splitlines()[0])
        fix = f"Save model and tokenizer, or image processor, again with save_pretrained of {library}."
        expected = f"a directory that {library} {version(library)} reads"
        raise GoldenError(f"{directory} in {library}", given=given, expected=expected, fix=fix) from None
    difference = max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)
    allowed = _ALLOWED * max(float(np.abs(theirs).max()) for _, theirs in pairs)
    if not difference <= allowed:
        given, expected = Raw(f"a difference of {difference:.2g}"), f"at most {allowed:.2g}"
        fix = f"The directory has something that is not computed here. {PACK}"
        raise GoldenError(f"{directory} compared with {library}", given=given, expected=expected, fix=fix)
    return Parity(f"{library} {version(library)}", difference)


def _ours(found: FineTuned, texts: Sequence[tuple[str, ...]]) -> list[list[Array]]:
    assert found.tokenizer is not None
    examples = Examples(tuple(texts), np.zeros(len(texts), np.int64))
    rows = encode(found.tokenizer, examples, found.architecture.max_length)
    outputs = [one.outputs for one in outputs_by_row(found.model, rows)]
    return [[one.numpy()] if isinstance(one, torch.Tensor) else [each.numpy() for each in one] for one in outputs]


def _embeddings(directory: Path, found: FineTuned) -> list[tuple[Array, Array]]:
    texts = sample_texts(pair=False)
    _transformers()  # silences the bars of the library, too
    library = importlib.import_module("sentence_transformers")
    model = library.SentenceTransformer(str(directory), device="cpu", trust_remote_code=False, local_files_only=True)
    theirs = model.float().encode([text for (text,) in texts], show_progress_bar=False)
    return [(ours, want) for (ours,), want in zip(_ours(found, texts), theirs, strict=True)]


def _texts(directory: Path, found: FineTuned) -> list[tuple[Array, Array]]:
    texts = sample_texts(found.architecture.pair)
    tokenizer = _load("AutoTokenizer", directory)
    model = _model(directory, found)
    columns = [list(column) for column in zip(*texts, strict=True)]
    limit = found.architecture.max_length
    inputs = tokenizer(*columns, padding=True, truncation=True, max_length=limit, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs)
    spans = isinstance(found.model, SpanClassifier)
    theirs = [outputs.start_logits, outputs.end_logits] if spans else [outputs.logits]
    pairs = []
    for row, ours in enumerate(_ours(found, texts)):
        # Of tokens, without their padding.
        pairs += [(one, want[row].numpy()[: len(one)]) for one, want in zip(ours, theirs, strict=True)]
    return pairs


def _images(directory: Path, found: FineTuned) -> list[tuple[Array, Array]]:
    step = found.architecture.image
    assert step is not None
    pillow = importlib.import_module("PIL.Image")
    images, read = sample_images(step), ImagePreprocessor(step).read
    ours = torch.from_numpy(np.stack([read(data, "image") for data in images]))
    processor = _load("AutoImageProcessor", directory)
    theirs = processor([pillow.open(BytesIO(data)) for data in images], return_tensors="pt")["pixel_values"]
    model = _model(directory, found)
    with torch.no_grad():
        return [(found.model(ours).numpy(), model(theirs).logits.numpy()), (ours.numpy(), theirs.numpy())]


def _model(directory: Path, found: FineTuned) -> Any:
    return _load(_CLASSES[found.architecture.task], directory, dtype=torch.float32).eval()


def _transformers() -> Any:
    """Return the package, which shows no bars and no warnings."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _load(kind: str, directory: Path, **options: Any) -> Any:
    read: Callable[..., Any] = getattr(_transformers(), kind).from_pretrained
    return read(str(directory), trust_remote_code=False, local_files_only=True, **options)
