"""Hold-outs whose texts are not learnt in another form: by shared texts, by sentence, or by source.

A mask [n] of bool says which rows are held out. It depends on hashes alone, so it is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from edge.datatypes import Array
from export.data.examples import HOLDOUT_SHARE, hash_order, held_out

#: Longest part of a text, in words, that is looked up among the others; phrases of SST-2 have 52 at most.
_LONGEST = 64


def held_texts(texts: Sequence[tuple[str, ...]], share: float = HOLDOUT_SHARE, seed: int = 0) -> Array:
    """Hold out a share of the rows, which have no text in common with the others.

    Rows that share a text, directly or through others, stay together. Where that leaves less than half of the share,
    because most rows hang together, those with the same first text do.
    """
    numbers = {text: number for number, text in enumerate(sorted({text for row in texts for text in row}))}
    links = np.array([(numbers[row[0]], numbers[row[-1]]) for row in texts], np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(texts)), (links[0], links[1])), shape=(len(numbers), len(numbers)))
    groups = connected_components(graph, directed=False)[1]
    names: dict[int, str] = {}
    for text, number in numbers.items():
        names.setdefault(groups[number], text)
    held = held_groups([names[groups[number]] for number in links[0]], share, seed)
    return held if held.sum() >= share * len(texts) / 2 else held_out([row[0] for row in texts], share, seed)


def held_groups(groups: Sequence[str], share: float, seed: int = 0) -> Array:
    """Hold out whole groups of rows, in the order of their hashes each that fits into a share of the rows."""
    names, counts = np.unique(np.array(groups, dtype=np.str_), return_counts=True)
    chosen, left = set[str](), int(np.ceil(share * len(groups)))
    for index in hash_order(names.tolist(), seed):
        if counts[index] <= left:
            chosen.add(str(names[index]))
            left -= int(counts[index])
    return np.array([group in chosen for group in groups], dtype=bool)


def held_sources(sources: Sequence[str], texts: Sequence[str]) -> Array:
    """Hold out whole sources, up to half of a tenth of the rows, and rows of the other sources for the rest of it.

    So is CoLA's dev: 516 of its 1,043 sentences are from sources that its training set lacks.
    """
    held = held_groups(sources, HOLDOUT_SHARE / 2)
    others = np.flatnonzero(~held)
    left = (HOLDOUT_SHARE * len(sources) - held.sum()) / max(1, len(others))
    held[others] = held_out([texts[row] for row in others.tolist()], left)
    return held


def held_phrases(texts: Sequence[str]) -> Array:
    """Hold out phrases of a tenth of the sentences; none stands, word by word, within a phrase that is learnt.

    A sentence is a text that stands within no other one. A phrase is held out if all sentences that it stands in are.
    """
    found = _sentences(texts)
    sentences = [text for text, longer in found.items() if longer == [text]]
    held = {text for text, out in zip(sentences, held_out(sentences, HOLDOUT_SHARE), strict=True) if out}
    return np.array([held.issuperset(found[text]) for text in texts], dtype=bool)


def _sentences(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the sentences that each text stands in: of a sentence, itself."""
    found: dict[str, list[str]] = {text: [] for text in texts}
    for text in sorted(found, key=lambda text: -len(text.split())):
        if found[text]:
            continue  # a longer one has all of its parts
        words = text.split()
        parts = {
            " ".join(words[first:last])
            for first in range(len(words))
            for last in range(first + 1, min(first + _LONGEST, len(words)) + 1)
        }
        for part in parts & found.keys() | {text}:
            found[part].append(text)
    return found
