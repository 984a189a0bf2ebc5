"""Settings and parts of the experiment, as its directory has them."""

from __future__ import annotations

from typing import Literal

import msgspec

from export.generate.finetune import BasePrecision

#: How the begin tokens stand before a text: once as in training, twice, or twice while all further tokens keep their
#: places of the training.
Begin = Literal["once", "twice", "twice, places kept"]
BEGINS: tuple[Begin, ...] = ("once", "twice, places kept", "twice")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all parts.

    Attributes:
        backbone: SHA-256 of its identity.
        data: SHA-256 of the examples that are trained on, and of each test split.
        begin: the tokens that stand before each text once in training.
        rank, epochs, rate: as in :class:`export.generate.finetune.Tuning`.
    """

    backbone: str
    data: dict[str, str]
    begin: tuple[int, ...]
    rank: int
    epochs: int
    rate: float


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What one model predicts on a split under one condition: a number for each example.

    Attributes:
        merged: whether the adapter is merged into the FP32 base, in place of working on the base of its training.
        tokens: of the right completion.
        hits: of these, how many are the most likely ones given the right ones before them.
        written: whether greedy decoding writes exactly these tokens.
        answered: whether the answer in the written text is right.
    """

    split: str
    merged: bool
    begin: Begin
    tokens: tuple[int, ...]
    hits: tuple[int, ...]
    written: tuple[bool, ...]
    answered: tuple[bool, ...]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter: the precision of the base that it was trained on, its seed, and its scores.

    Attributes:
        best_epoch: the one that is kept.
    """

    base: BasePrecision
    seed: int
    parameters: int
    seconds: float
    best_epoch: int
    scores: tuple[Scores, ...]
