"""Texts with their targets, and hold-outs by hash: the same on every machine, without splitting items of one key."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from edge.datatypes import Array
from export.training.runs import SplitRows

#: Names of the split to train on, and of the part of it for choices.
TRAIN, HOLDOUT = "train", "holdout"
#: Share of the keys of a training set that are held out.
HOLDOUT_SHARE = 0.1
#: Share of the items that become dev where there is none, and the seed, another than the hold-out's, so that neither
#: split depends on the other.
DEV_SHARE, DEV_SEED = 0.2, 1


class Examples(msgspec.Struct, frozen=True):
    """Texts, one or two each, and their targets [n]: class numbers (int64) or scores (float32)."""

    texts: tuple[tuple[str, ...], ...]
    targets: Array

    def take(self, rows: Array) -> Examples:
        """Return the examples with these indices, or of a mask [n]."""
        chosen = np.arange(len(self.texts))[rows]
        return Examples(tuple(self.texts[row] for row in chosen), self.targets[chosen])


class Splits(NamedTuple):
    """Examples to train on, those held out for choices, and those for published metrics, by the name of the split."""

    train: Examples
    holdout: Examples
    dev: dict[str, Examples]

    @property
    def measured(self) -> dict[str, Examples]:
        """The splits on which a run is measured, by name."""
        return {HOLDOUT: self.holdout, **self.dev}

    @property
    def rows(self) -> tuple[SplitRows, ...]:
        """The size of each split, and how many of its texts are in the training set, too."""
        known = set(self.train.texts)
        shared = {name: sum(texts in known for texts in one.texts) for name, one in self.measured.items()}
        return (
            SplitRows(TRAIN, len(self.train.texts)),
            *(SplitRows(name, len(one.texts), shared[name]) for name, one in self.measured.items()),
        )


def split_holdout(train: Examples) -> tuple[Examples, Examples]:
    """Return a training set and a hold-out for choices, so that dev is left for the final metrics.

    Examples with the same first text stay together. Labelled texts have stricter hold-outs, of
    :mod:`export.data.holdouts`; of runs of earlier versions, this one.
    """
    held = held_out([texts[0] for texts in train.texts], HOLDOUT_SHARE)
    return train.take(~held), train.take(held)


def limited(examples: Examples, number: int | None) -> Examples:
    """Return ``number`` examples, always the same, drawn by the hash of their texts; all of them for None."""
    if number is None or number >= len(examples.texts):
        return examples
    return examples.take(drawn(["\t".join(texts) for texts in examples.texts], number))


def held_out(keys: Sequence[str], share: float, seed: int = 0) -> Array:
    """Return the mask of the held-out items, [n] of bool.

    Distinct keys are ordered by their hash with the seed; the first ``share`` of them, rounded up, is held out.

    Args:
        keys: of each item; items with the same key, such as questions on one article, stay together.
        share: of the keys, 0 to 1.
    """
    distinct = tuple(dict.fromkeys(keys))
    chosen = {distinct[index] for index in hash_order(distinct, seed)[: math.ceil(share * len(distinct))]}
    return np.array([key in chosen for key in keys], dtype=bool)


def hash_order(keys: Sequence[str], seed: int = 0) -> Array:
    """Return the order of the keys by their hash with the seed, as indices [n]; equal keys keep their order."""
    digests = [hashlib.sha256(f"{seed}\n{key}".encode()).digest() for key in keys]
    return np.array(sorted(range(len(keys)), key=digests.__getitem__), dtype=np.int64)


def drawn(keys: Sequence[str], number: int | None) -> Array:
    """Return the ascending indices of ``number`` items drawn by the hash of their keys; all of them for None."""
    return np.sort(hash_order(keys)[:number])
