"""A fine-tuned Hugging Face directory to a run directory."""

from __future__ import annotations

import importlib
import time
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
from export.finetune.imported import ImportedTask
from export.finetune.models import MODEL
from export.finetune.objectives import outputs_by_row
from export.importing.directory import FineTuned, read_directory
from export.importing.image_processor import sample_images
from export.models.heads import SentenceEmbedder, tensors_of
from export.models.huggingface import PACK
from export.training.checkpoint import save
from export.training.provenance import processor, provenance
from export.training.runs import TOKENIZER, RunConfig, RunMetrics


class ImportedRun(msgspec.Struct, frozen=True):
    """A run that was made of a Hugging Face directory.

    Attributes:
        task: of :data:`export.finetune.IMPORTED`.
        labels: none of a span or an embedding.
        width: columns of an output.
        parity: None if the package to compare with, ``missing``, is not installed.
    """

    run: str
    task: str
    labels: tuple[str, ...]
    width: int
    max_length: int
    parameters: int
    parity: Parity | None
    missing: str | None


def import_run(
    directory: Path,
    run: Path,
    *,
    data: Path | None = None,
    pair: bool = False,
    no_answer: bool = False,
    max_length: int | None = None,
) -> ImportedRun:
    """Read a directory, compare it with the package that saved it, and write a run; an earlier run is replaced.

    Args:
        data: texts or images, whose path is recorded for later commands.
        pair, no_answer, max_length: see :func:`export.importing.directory.read_directory`.

    Raises:
        CheckpointError: the directory is malformed or not supported.
        GoldenError: its outputs are not those of the package.
        DataError: ``data`` cannot be read.
    """
    started = time.perf_counter()
    found = read_directory(directory, pair=pair, no_answer=no_answer, max_length=max_length)
    if data is not None:
        ImportedTask(found.architecture, found.model).items(data)
    missing = missing_library(found)
    parity = None if missing else check_parity(directory, found)
    parameters = sum(parameter.numel() for parameter in found.model.parameters())
    record = provenance(trainer=f"imported from {directory.name}", data="that of the imported model", seed=None)
    architecture = msgspec.to_builtins(found.architecture)
    place = None if data is None else str(data.resolve())
    space = found.model.fingerprint() if isinstance(found.model, SentenceEmbedder) else None
    save(
        run,
        found.model,
        RunConfig(MODEL, architecture, record, place, processor=processor(), space=space),
        RunMetrics(parameters, 0, 0, time.perf_counter() - started, ()),
        {} if found.tokenizer is None else {TOKENIZER: found.tokenizer.to_str().encode()},
    )
    of = found.architecture
    return ImportedRun(str(run), of.task, of.labels, found.model.width, of.max_length, parameters, parity, missing)


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
    needed = "sentence-transformers" if found.architecture.embedding else "transformers"
    return None if find_spec(needed.replace("-", "_")) else needed


def check_parity(directory: Path, found: FineTuned) -> Parity:
    """Compute sentences or images of ours with both implementations, and compare all outputs.

    The texts pass through the tokenizer of each, and images through the processor of each.

    Raises:
        GoldenError: the outputs differ, or the package cannot read the directory.
    """
    if found.architecture.image is not None:
        library, compute = "transformers", _images
    elif found.architecture.embedding:
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
    return [[one.numpy() for one in tensors_of(row.outputs)] for row in outputs_by_row(found.model, rows)]


def _embeddings(directory: Path, found: FineTuned) -> list[tuple[Array, Array]]:
    texts = sample_texts(pair=False)
    _transformers()  # silences the bars of the library, too
    library = importlib.import_module("sentence_transformers")
    model = library.SentenceTransformer(str(directory), device="cpu", trust_remote_code=False, local_files_only=True)
    model.max_seq_length = found.architecture.max_length  # which may be less than the directory's
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
    theirs = [getattr(outputs, name) for name in found.model.outputs]
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
