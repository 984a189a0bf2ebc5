"""Texts with their targets, before they are tokenised, and which of them are held out."""

from __future__ import annotations

import msgspec
import numpy as np

from edge.datatypes import Array
from export.tasks.holdout import drawn, held_out


class Examples(msgspec.Struct, frozen=True):
    """Texts, one or two each, and their targets [n]: class numbers (int64) or scores (float32)."""

    texts: tuple[tuple[str, ...], ...]
    targets: Array

    def take(self, rows: Array) -> Examples:
        """Return some of the examples, by their indices or by a mask [n]."""
        chosen = np.arange(len(self.texts))[rows]
        return Examples(tuple(self.texts[row] for row in chosen), self.targets[chosen])


def split_holdout(train: Examples, seed: int = 0, share: float = 0.1) -> tuple[Examples, Examples]:
    """Split a training set into one to learn from and one to choose by, so that dev is left for the final figures.

    Examples with the same first text stay together. Of SST-2 that does not keep the parts independent: its training
    set holds phrases of the same sentences, so what is measured on its hold-out is too good.

    Args:
        seed: of the split, not of the training: all runs that are compared must share it.
        share: how much of the training set is held out.

    Returns:
        What to train on, and the hold-out.
    """
    held = held_out([texts[0] for texts in train.texts], share, seed)
    return train.take(~held), train.take(held)


def limited(examples: Examples, number: int | None) -> Examples:
    """Return ``number`` examples drawn by the hash of their texts, always the same; all of them for None."""
    if number is None or number >= len(examples.texts):
        return examples
    return examples.take(drawn(["\t".join(texts) for texts in examples.texts], number))
