"""Runs whose files ``fewheads int8`` scores: classifiers on their task, and models that embed sentences on STS-B."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.bundle.accuracy import outputs_by_row, predictions_of
from export.data.examples import Examples, limited
from export.data.tokens import Rows, encode, load_tokenizer
from export.finetune.image_tasks import ImageTask
from export.finetune.models import OpenedModel, open_model
from export.finetune.predictions import Predictions, read_matching
from export.finetune.run import prepare, task_of
from export.finetune.text_tasks import TASKS, SentenceTask
from export.models.heads import Head, SentenceEmbedder

#: Of models that embed sentences: people's scores for pairs of sentences.
_PAIRS = TASKS["STS-B"]


class ScoredRun(NamedTuple):
    """A run in FP32, and rows to calibrate it with and to score it on.

    Attributes:
        task, metric: what it is scored on.
        train: to calibrate with.
        rows: to score on; of a model that embeds sentences, both of a pair, one after the other.
        targets: of the items to score, [n].
        predictions: makes predictions for the items of the outputs for each row.
        fp32: predictions of the plain file, which is given.
    """

    task: str
    metric: str
    head: Head
    train: Rows
    rows: Rows
    targets: Array
    predictions: Callable[[Sequence[Mapping[str, Array]]], Predictions]
    fp32: Callable[[bytes, Callable[[int, int], None]], Predictions]


def scored_run(run: Path, data_dir: Path, split: str, calibration_rows: int) -> ScoredRun:
    """Open a run; raise a UsageError if it cannot be scored, or has no such split."""
    model = open_model(run)
    if model.measured_in_int8:
        given, fix = Raw("a run that an earlier version trained for INT8"), "Give the run that it was made of."
        raise UsageError(f"run {run}", given=given, expected="a run in FP32, to compare with", fix=fix)
    if isinstance(model.head, SentenceEmbedder):
        return _embedder(run, model, data_dir, split, calibration_rows)
    task = task_of(model, run)
    if not isinstance(task, SentenceTask | ImageTask) or model.head is None or model.architecture is None:
        given, fix = Raw(f"a run on {task.name}"), "Give a run of 'fewheads finetune' with classes or a score."
        raise UsageError(f"run {run}", given=given, expected="a classifier or regression", fix=fix)
    data = prepare(task, data_dir, task.reader(run), max_length=model.architecture.max_length, limit=None)
    rows = data.measured[_known(split, data.measured)]
    return ScoredRun(
        *(task.name, task.headline, model.head, data.train, rows, rows.targets),
        predictions=lambda outputs: predictions_of(outputs, rows.targets),
        fp32=lambda plain, on_rows: read_matching(run, split, rows.targets),
    )


def _embedder(run: Path, model: OpenedModel, data_dir: Path, split: str, calibration_rows: int) -> ScoredRun:
    head, architecture, tokenizer = model.head, model.architecture, load_tokenizer(run)
    assert head, "a run has one"
    assert architecture, "a run has one"
    splits = _PAIRS.examples(data_dir)
    items = splits.measured[_known(split, splits.measured)]

    def sentences(examples: Examples) -> Rows:
        texts = tuple((text,) for text in chain.from_iterable(examples.texts))
        return encode(tokenizer, Examples(texts, np.zeros(len(texts), np.int64)), architecture.max_length)

    def cosines(outputs: Sequence[Mapping[str, Array]]) -> Predictions:
        embeddings = np.stack([row[head.outputs[0]] for row in outputs])
        return Predictions(head.agreements(embeddings[::2], embeddings[1::2])[:, None], items.targets)

    rows = sentences(items)
    return ScoredRun(
        *(_PAIRS.name, _PAIRS.headline, head, sentences(limited(splits.train, calibration_rows))),
        *(rows, items.targets),
        predictions=cosines,
        fp32=lambda plain, on_rows: cosines(outputs_by_row(plain, rows, subject="FP32", on_rows=on_rows)),
    )


def _known(split: str, splits: Mapping[str, object]) -> str:
    if split not in splits:
        raise UsageError("--split", given=split, expected=f"one of {', '.join(splits)}", fix="Give one of them.")
    return split
