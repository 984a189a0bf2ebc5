"""What the caches of all decoders share: their smallest size, and the tensors that fit into one array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from edge.datatypes import NUMPY_TYPES, TensorSpec

#: Tokens of a row that a cache has room for at first; it doubles as rows grow.
FEWEST_PLACES = 32
#: A cache that shrinks has this part of its longest row as room, or it would soon grow again.
_ROOM = 1 / 8


class Group(NamedTuple):
    """The tensors of a cache that differ in nothing but their rows and places."""

    names: tuple[str, ...]
    heads: int
    width: int
    dtype: np.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one head at one place."""
        return self.width * self.dtype.itemsize


def groups_of(specs: Iterable[TensorSpec]) -> tuple[Group, ...]:
    """Return the groups of tensors [rows, heads, places, width]."""
    names: dict[tuple[int, int, str], list[str]] = {}
    for spec in specs:
        _, heads, _, width = spec.shape
        names.setdefault((heads, width, spec.datatype), []).append(spec.name)
    return tuple(
        Group(tuple(some), heads, width, np.dtype(NUMPY_TYPES[datatype]))
        for (heads, width, datatype), some in names.items()
    )


def places_for(tokens: int) -> int:
    """Return the places of a cache that grows to rows of so many tokens: a power of two."""
    return max(FEWEST_PLACES, 1 << max(tokens - 1, 0).bit_length())


def places_left(longest: int) -> int:
    """Return the places of a cache that shrinks to rows of so many tokens, if at least half of its own are more."""
    return places_for(longest + int(_ROOM * longest) + 1)
