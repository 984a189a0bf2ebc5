"""Results of the experiment, as results.json has them."""

from __future__ import annotations

from typing import Literal

import msgspec

from export.generate.base import BaseIdentity
from export.generate.finetune import BasePrecision
from export.papers.backward.mismatch.records import Begin, Settings
from export.training.intervals import Difference, Mean
from export.training.provenance import Processor

#: How predictions are scored: tokens, or whole completions, that are right given the right tokens before them; whole
#: completions that greedy decoding writes; and right answers in what it writes.
Metric = Literal["tokens", "forced", "written", "answers"]


class Row(msgspec.Struct, frozen=True):
    """All metrics under one condition on one split."""

    base: BasePrecision
    merged: bool
    begin: Begin
    split: str
    items: int
    seeds: int
    values: dict[Metric, Mean]


class Effect(msgspec.Struct, frozen=True):
    """What a switch changes, by split."""

    base: BasePrecision
    switch: str
    changes: dict[str, Difference]


class Step(msgspec.Struct, frozen=True):
    """A step of the path: the accuracy after it, and its change; the first has none."""

    name: str
    split: str
    accuracy: Mean
    change: Difference | None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All results.

    Attributes:
        missing: parts that are still to be computed.
        path: of the adapters that were trained on the NF4 base; empty before there is one.
        agreements: how many completions, over all conditions, are right both when teacher-forced and when written
            freely, or in neither case; ``completions`` is the number of all.
    """

    base: BaseIdentity
    settings: Settings
    missing: int
    verdict: str
    rows: tuple[Row, ...]
    effects: tuple[Effect, ...]
    path: tuple[Step, ...]
    agreements: int
    completions: int
    processor: Processor
