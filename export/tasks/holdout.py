"""Hold-outs by hash: the same on every machine and NumPy, and what shares a key is never torn apart."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array


def held_out(keys: Sequence[str], share: float, seed: int = 0) -> Array:
    """Return which items are held out, [n] of bool.

    Distinct keys are ordered by their hash with the seed; the first ``share`` of them, rounded up, are held out.

    Args:
        keys: of each item; those with the same key, such as questions on one article, stay together.
        share: of the keys, 0 to 1.
        seed: another seed holds out other keys.
    """
    distinct = tuple(dict.fromkeys(keys))
    chosen = {distinct[index] for index in hash_order(distinct, seed)[: math.ceil(share * len(distinct))]}
    return np.array([key in chosen for key in keys], dtype=bool)


def hash_order(keys: Sequence[str], seed: int = 0) -> Array:
    """Return the order of the keys by their hash with the seed, as indices [n]; equal keys keep their order."""
    digests = [hashlib.sha256(f"{seed}\n{key}".encode()).digest() for key in keys]
    return np.array(sorted(range(len(keys)), key=digests.__getitem__), dtype=np.int64)


def drawn(keys: Sequence[str], number: int | None) -> Array:
    """Return the indices of ``number`` items drawn by the hash of their keys, ascending; of all of them for None."""
    return np.sort(hash_order(keys)[:number])
