"""Embeddings of texts by a run, kept on the disk in parts, so that an interrupted evaluation goes on."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.files import sha256, write_whole
from export.data.examples import Examples
from export.data.tokens import encode, load_tokenizer
from export.finetune.imported import answers
from export.finetune.models import Architecture, open_model, space_of
from export.models.heads import SentenceEmbedder
from export.training.device import DeviceName, device_of
from export.training.runs import TOKENIZER, WEIGHTS, RunConfig

#: Texts of a part: those that an interruption may lose.
PART = 1024


class EmbeddingRun(NamedTuple):
    """A run with an embedding.

    Attributes:
        weights: SHA-256 of its file of weights.
        key: hash of all that its embeddings depend on.
        space: of its embeddings; None for runs of earlier versions.
    """

    name: str
    model: SentenceEmbedder
    tokenizer: Tokenizer
    architecture: Architecture
    config: RunConfig
    weights: str
    key: str
    space: str | None

    @property
    def max_length(self) -> int:
        """Most tokens of a text."""
        return min(self.architecture.max_length, self.architecture.transformer.max_positions)


def open_embedder(directory: Path, device: DeviceName = "cpu") -> EmbeddingRun:
    """Read a run with an embedding, to compute on a device; raise a UsageError for another model."""
    found = open_model(directory)
    if found.config is None or found.architecture is None or not isinstance(found.head, SentenceEmbedder):
        given = found.architecture.task if found.architecture else "a model without a head"
        expected = (
            "a run with an embedding, imported from a directory of sentence-transformers or reduced from such a run"
        )
        fix = "Give such a run; of a classifier, 'fewheads report' shows the metrics."
        raise UsageError(f"run {directory}", given=Raw(given), expected=expected, fix=fix)
    weights = sha256((directory / WEIGHTS).read_bytes())
    place = device_of(device)
    parts = [weights.encode(), msgspec.json.encode(found.architecture), (directory / TOKENIZER).read_bytes()]
    key = sha256(b"\n".join([*parts, place.type.encode()]))  # a GPU rounds otherwise
    name = directory.resolve().name
    model = found.head.to(place).eval()
    space, tokenizer = space_of(found), load_tokenizer(directory)
    return EmbeddingRun(name, model, tokenizer, found.architecture, found.config, weights, key, space)


def embed(
    run: EmbeddingRun, texts: Sequence[str], cache: Path | None, on_texts: Callable[[int], None] = lambda done: None
) -> Array:
    """Return the embeddings of texts with length 1, [n, width] of float32.

    Args:
        cache: directory of parts of earlier calls; None keeps none.
        on_texts: called with the number of texts of each part that is done.
    """
    distinct = list(dict.fromkeys(texts))
    row = {text: number for number, text in enumerate(distinct)}
    vectors = np.concatenate([*_parts(run, distinct, cache, on_texts)])
    return np.asarray(vectors[[row[text] for text in texts]])


def _parts(
    run: EmbeddingRun, texts: Sequence[str], cache: Path | None, on_texts: Callable[[int], None]
) -> Iterator[Array]:
    for first in range(0, len(texts), PART):
        part = texts[first : first + PART]
        path = cache and cache / f"{run.key[:16]}-{_digest(part)[:32]}.npy"
        vectors = _read(path, (len(part), run.model.width)) if path else None
        if vectors is None:
            vectors = _compute(run, part)
            if path:
                buffer = io.BytesIO()
                np.save(buffer, vectors)
                write_whole(path, buffer.getvalue())
        yield vectors
        on_texts(len(part))


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _read(path: Path, shape: tuple[int, int]) -> Array | None:
    try:
        vectors: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return vectors if vectors.shape == shape else None


def _compute(run: EmbeddingRun, texts: Sequence[str]) -> Array:
    rows = encode(run.tokenizer, Examples(tuple((text,) for text in texts), np.zeros(len(texts))), run.max_length)
    vectors = answers(run.model, rows)
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), dtype=np.float32)
