"""Modules of the mathematics dataset as tasks: one to train on, to choose with, and to test on each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.errors import Raw
from export.errors import DataError
from export.generate.evaluate import completion_limit, encode_fitting
from export.generate.formats import Example, Source, read_source
from export.generate.tokenizer import Encoded, TextTokenizer
from export.generate.train import read_corpus

FORMAT, TRAIN, TEST = "mathematics", "train*", "interpolate"


class Task(NamedTuple):
    """A module; examples that do not fit into the language model's positions are left out.

    Attributes:
        train, holdout: as tokens, from the training splits.
        test: the examples of the test split, and ``test_rows`` the same as tokens.
    """

    name: str
    train: list[Encoded]
    holdout: list[Encoded]
    test: tuple[Example, ...]
    test_rows: list[Encoded]

    @property
    def max_tokens(self) -> int:
        """The most tokens of a completion, by the training examples."""
        return completion_limit(self.train)


def read_task(path: Path, tokenizer: TextTokenizer, positions: int, limit: int) -> Task:
    """Return the task of DIRECTORY/MODULE, whose files are DIRECTORY/SPLIT/MODULE.txt.

    Questions of the test split are neither trained on nor chosen with.

    Args:
        limit: examples to train on, at most; they are drawn, always the same, from all training splits alike.

    Raises:
        DataError: a file is missing or malformed, or no example fits.
    """
    trains = sorted(path.parent.glob(f"{TRAIN}/{path.name}.txt"))
    if not trains:
        fix = "Generate them with export/papers/backward/generate_mathematics.py, or correct the path."
        expected = f"{path.parent}/{TRAIN}/{path.name}.txt"
        raise DataError(f"--data {path}", given=Raw("no training split"), expected=expected, fix=fix)
    corpus = read_corpus([Source(FORMAT, str(file)) for file in trains], seed=0)
    test_file = path.parent / TEST / f"{path.name}.txt"
    (examples,) = read_source(Source(FORMAT, str(test_file))).values()
    asked = {example.prompt for example in examples}
    train, holdout = ([one for one in part if one.prompt not in asked] for part in (corpus.train, corpus.holdout))
    order = np.random.default_rng(0).permutation(len(train))[:limit]
    test = tuple(one for one in examples if len(tokenizer.encode(one).ids) <= positions)
    return Task(
        path.name,
        encode_fitting(tokenizer, [train[place] for place in order], positions),
        encode_fitting(tokenizer, holdout, positions),
        test,
        encode_fitting(tokenizer, test, positions),
    )
