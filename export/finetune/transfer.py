"""Unlabelled text beside a training set: a student learns the answers of its teacher to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from edge.datatypes import Array
from edge.errors import Raw
from export.data.evaluation import has_evaluated
from export.data.examples import Examples
from export.data.tokens import Rows, shuffled_batches
from export.data.unlabelled import read_texts
from export.errors import DataError
from export.finetune.objectives import TaskObjective, Teacher

#: Shuffles of the text that an epoch may use.
_SHUFFLES = 1 << 20
#: Words of the texts that are drawn from a file: as many as most sentences of GLUE have, which also cost little.
_SHORT = range(4, 21)
#: A text is paired with one of so many that are nearest among so many texts: the time grows with their product.
_NEAREST, _BLOCK = 4, 20_000


def read_transfer(path: Path, pair: bool, measured: Iterable[Examples], most: int | None = None) -> Examples:
    """Read a text in each line; for ``pair``, each is put before a similar one.

    Of texts drawn at random nearly no two are related, so a teacher has the same answer to all such pairs. By turns it
    is one of the four nearest by TF-IDF, and the text itself with up to half of its words changed.

    Args:
        most: take the first texts of 4 to 20 words, so many, without those that models are measured on.

    Raises:
        DataError: as :func:`export.data.unlabelled.read_texts`; none is short enough; or a text, or a sentence of it,
            is one that models are measured on.
    """
    texts = [text for (text,) in read_texts(path, pair=False)]
    if most:
        texts = [text for text in texts if len(text.split()) in _SHORT][: 2 * most]
    known = {text for examples in measured for row in examples.texts for text in row}
    within = has_evaluated(((text,) for text in texts), known)
    # Of few letters, only the whole text counts.
    shared = {text: None for text, has in zip(texts, within, strict=True) if has or text in known}
    if most:
        texts = [text for text in texts if text not in shared][:most]
        if len(texts) < 2:
            given, expected = Raw(f"{len(texts)} lines of 4 to 20 words"), "two at least"
            raise DataError(f"texts {path}", given=given, expected=expected, fix="Give a sentence in each line.")
    elif shared:
        example = next(iter(shared))[:60]
        given = Raw(f"{len(shared):,} of {len(texts):,} with text of the hold-out or dev, such as {example!r}")
        fix = "Remove these lines."
        raise DataError(f"texts {path}", given=given, expected="texts that nothing is measured on", fix=fix)
    rows = _similar_pairs(texts) if pair else tuple((text,) for text in texts)
    return Examples(rows, np.zeros(len(rows), np.int64))


def _similar_pairs(texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return each text before a similar one: by turns one of the nearest by TF-IDF, and itself with words changed."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second
    from sklearn.neighbors import NearestNeighbors

    random, pairs = np.random.default_rng(0), list[tuple[str, ...]]()
    words = [word for text in texts for word in text.split()]
    for start in range(0, len(texts), _BLOCK):
        block = texts[start : start + _BLOCK]
        vectors = TfidfVectorizer(token_pattern=r"\S+", sublinear_tf=True, dtype=np.float32).fit_transform(block)
        search = NearestNeighbors(n_neighbors=min(1 + _NEAREST, len(block)), metric="cosine").fit(vectors)
        nearest = search.kneighbors(vectors[::2], return_distance=False)
        for at, text in enumerate(block):
            others = [other for other in nearest[at // 2] if other != at] if at % 2 == 0 else []
            pairs.append((text, block[int(random.choice(others))] if others else _changed(text, words, random)))
    return tuple(pairs)


def _changed(text: str, words: Sequence[str], random: np.random.Generator) -> str:
    """Return a text with up to half of its words left out, replaced by any others, or in another place.

    A few texts stay as they are, where the words are equal or change places twice.
    """
    changed = text.split()
    for _ in range(random.integers(1, max(1, len(changed) // 2) + 1)):
        at, other = random.integers(len(changed), size=2)
        change = random.integers(3)
        if change == 0 and len(changed) > 1:
            del changed[at]
        elif change == 1:
            changed[at] = words[int(random.integers(len(words)))]
        else:
            changed[at], changed[other] = changed[other], changed[at]
    return " ".join(changed)


class TransferObjective(TaskObjective):
    """The objective of a task with a teacher, whose answers to further rows are a share of every batch.

    Args:
        transfer: rows without labels.
        transfer_teacher: the teacher's outputs on them; None computes those of each batch.
        options: of :class:`TaskObjective`, with a teacher.
    """

    def __init__(
        self, *arguments: Any, transfer: Rows, transfer_teacher: Teacher | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._transfer, self._transfer_teacher = transfer, transfer_teacher
        share = self._recipe.distillation.transfer_share
        self._transfer_size = max(1, round(self._recipe.batch_size * share / (1 - share)))

    def fingerprint(self) -> str:
        """Return a hash of the weights, the teacher's, and all rows."""
        return self._fingerprint(chain(self._train.contents, self._transfer.contents))

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Array, Array]]:
        """Yield the rows of each batch, and those of the transfer text, which begins anew where it is too short."""
        shuffles = (
            shuffled_batches(
                self._transfer.lengths, self._transfer_size, seed=self._seed, epoch=epoch * _SHUFFLES + number
            )
            for number in count()
        )
        return zip(super().batches(epoch, first), islice(chain.from_iterable(shuffles), first, None), strict=False)

    def loss(self, batch: Any, progress: float) -> Tensor:
        """Return the mean of both losses, each by its share of the rows."""
        rows, texts = batch
        inputs, share = self._transfer.batch(texts).to(self._device), self._recipe.distillation.transfer_share
        if self._transfer_teacher:
            wanted = self._transfer_teacher.outputs_for(texts, inputs, self._teacher_layers)
        else:
            assert self._teacher is not None
            wanted = self._teacher.answer(inputs, self._teacher_layers)
        outputs, states = self._student(inputs)
        imitation, hidden = self._imitation(outputs, states, wanted, inputs.mask)
        return (1 - share) * super().loss(rows, progress) + share * (imitation + hidden)
