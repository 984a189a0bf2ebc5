"""SQuAD as a task: splits by article, answers as text, and the official metrics, exact match and F1 of tokens."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer

from edge.bundles.spans import likeliest
from edge.bundles.steps import SpanPostprocess
from edge.datatypes import Array
from edge.errors import Raw
from edge.files import sha256
from export.data.examples import DEV_SEED, DEV_SHARE, HOLDOUT_SHARE, TRAIN, Examples, drawn
from export.data.question_tables import read_questions
from export.data.squad import (
    Question,
    Windows,
    encode_windows,
    read_splits,
    split_articles,
    window_shape,
)
from export.data.tables import DataFiles, find
from export.data.tokens import Rows, sorted_batches
from export.errors import DataError
from export.finetune.imported import ImportedTask
from export.finetune.models import Architecture, OpenedModel
from export.finetune.predictions import Predicted
from export.finetune.task import Data, Reader, TextTask
from export.models.heads import Head, SpanClassifier
from export.models.transformer import TransformerConfig
from export.training.device import model_device
from export.training.runs import DataFile, OwnData, RunConfig, SplitRows

_BATCH = 16
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answers(Predicted, frozen=True):
    """Answers to questions, [n] each.

    Attributes:
        questions: their identifiers.
        exact_match: 0 or 1, from :func:`exact_match`.
        f1: 0 to 1, from :func:`token_f1`.
    """

    questions: Array
    texts: Array
    exact_match: Array
    f1: Array

    @classmethod
    def of(cls, questions: Sequence[Question], texts: Sequence[str]) -> Answers:
        """Return answers with their correctness."""
        right = [[answer.text for answer in question.answers] or [""] for question in questions]
        pairs = list(zip(texts, right, strict=True))
        return cls(
            np.array([question.id for question in questions], dtype=np.str_),
            np.array(texts, dtype=np.str_),
            np.array([exact_match(*pair) for pair in pairs]),
            np.array([token_f1(*pair) for pair in pairs]),
        )

    def of_items(self, metric: str) -> Array:
        return np.asarray(getattr(self, metric))


class SquadTask(TextTask, frozen=True, kw_only=True):
    """SQuAD v1.1, or XQuAD's English part, of which a quarter of the articles becomes dev."""

    origin: str = "questions in SQuAD v1.1 JSON"
    metrics: tuple[str, ...] = ("exact_match", "f1")
    headline: str = "f1"

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read the files, hold a tenth of the articles out, and cut contexts into windows that share up to a third."""
        assert isinstance(reader, Tokenizer)
        learning, dev = self.splits(Path(data_dir))
        train, holdout = split_articles(learning, HOLDOUT_SHARE)
        chosen = [train[index] for index in drawn([question.id for question in train], limit)]

        def encoded(questions: Sequence[Question]) -> Windows:
            return encode_windows(reader, questions, max_length=max_length, shape=window_shape(max_length))

        return Data((), encoded(chosen), encoded(holdout), {name: encoded(part) for name, part in dev.items()})

    def splits(self, data_dir: Path) -> tuple[tuple[Question, ...], dict[str, tuple[Question, ...]]]:
        """Return the questions for training, with the hold-out, and those of the splits for published metrics."""
        learning, dev = read_splits(data_dir / "squad")
        return learning, {"dev": dev}

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        return Architecture(task=self.name, transformer=transformer, labels=labels, max_length=max_length)

    def predict(self, model: Head, rows: Rows) -> Answers:
        assert isinstance(rows, Windows)
        assert isinstance(model, SpanClassifier)
        return Answers.of(rows.questions, extract(model, rows, model.postprocess()))


class OwnQuestions(SquadTask, frozen=True, kw_only=True):
    """A user's own questions, of which a fifth of the contexts becomes dev unless there is one."""

    own_data: OwnData

    def splits(self, data_dir: Path) -> tuple[tuple[Question, ...], dict[str, tuple[Question, ...]]]:
        data = self.own_data.located(data_dir)
        found = find(Path(data.path), None if data.dev is None else Path(data.dev))
        questions = _read_all(found)
        data.check_unchanged(_files(data, found, questions), data.path)
        return _with_dev(questions)

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        plain = super().architecture(transformer, labels, max_length)
        return msgspec.structs.replace(plain, no_answer=self.own_data.no_answer)


def describe_questions(data: OwnData) -> OwnData:
    """Return the description of own questions, all of which were read; raise a DataError for those that are wrong."""
    found = find(Path(data.path), None if data.dev is None else Path(data.dev))
    questions = _read_all(found)
    learning, dev = _with_dev(questions)
    train, holdout = split_articles(learning, HOLDOUT_SHARE)
    if not train:
        titles = len({question.title for question in learning})
        given, expected = Raw(f"{titles} beside dev"), "two or more contexts, or articles of JSON, beside those of dev"
        fix = "Give questions on others: of each, all are learnt from or none."
        raise DataError(data.path, given=given, expected=expected, fix=fix)
    known = {(question.question, question.context) for question in train}
    splits = {TRAIN: train, "holdout": holdout, **dev}
    return msgspec.structs.replace(
        data,
        spans=True,
        no_answer=any(not question.answers for question in learning),
        files=_files(data, found, questions),
        splits=tuple(
            SplitRows(
                name, len(part), None if part is train else sum((one.question, one.context) in known for one in part)
            )
            for name, part in splits.items()
        ),
    )


def _read_all(found: DataFiles) -> dict[str, tuple[Question, ...]]:
    return {name: read_questions(paths) for name, paths in found.splits.items()}


def _with_dev(
    questions: dict[str, tuple[Question, ...]],
) -> tuple[tuple[Question, ...], dict[str, tuple[Question, ...]]]:
    train = questions[TRAIN]
    dev = {name: part for name, part in questions.items() if name != TRAIN}
    if not dev:
        train, dev["dev"] = split_articles(train, DEV_SHARE, DEV_SEED)
    return train, dev


def _files(data: OwnData, found: DataFiles, questions: dict[str, tuple[Question, ...]]) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(name, data.name_of(path), len(questions[name]), sha256(path.read_bytes()))
        for name, paths in found.splits.items()
        for path in paths
    )


def questions_task(config: RunConfig | None) -> SquadTask | None:
    """Return the task of a run on questions; None of another run."""
    if config is None or config.own_data is None:
        return SQUAD if config is not None and config.arguments.get("task") == SQUAD.name else None
    return own_questions(config.own_data) if config.own_data.spans else None


def own_questions(data: OwnData) -> OwnQuestions:
    """Return the task of described questions."""
    return OwnQuestions(name=data.name, origin=data.origin, own_data=data)


SQUAD = SquadTask(name="SQuAD")


class SquadQuestions(ImportedTask, frozen=True, kw_only=True):
    """The task to answer as a run on questions, on those that it may learn from."""

    trained_on: SquadTask

    @property
    def origin(self) -> str:
        return self.trained_on.origin

    def items(self, data: Path) -> Examples:
        """Return questions with their contexts from a data directory, without targets."""
        texts = tuple((entry.question, entry.context) for entry in self.trained_on.splits(data)[0])
        return Examples(texts, np.zeros(len(texts), np.int64))


def as_imported(found: OpenedModel) -> OpenedModel:
    """Return a run on questions described as an imported model that answers them, and any other one as it is."""
    if found.architecture is None or questions_task(found.config) is None:
        return found
    described = msgspec.structs.replace(found.architecture, task="question-answering", pair=True)
    return msgspec.structs.replace(found, architecture=described)


def extract(model: Head, windows: Windows, step: SpanPostprocess) -> tuple[str, ...]:
    """Return the answer to each question, a part of its context, as a device does by ``step``; empty is none."""
    starts, ends = ([np.zeros(0)] * len(windows.tokens) for _ in range(2))
    device, lengths = model_device(model), windows.lengths
    with torch.inference_mode():
        for indices in sorted_batches(lengths, _BATCH):
            batch = windows.batch(indices).to(device)
            logits = [one.float().cpu().numpy() for one in model(batch.inputs, batch.mask, batch.segments)]
            for row, window in enumerate(indices):
                starts[window], ends[window] = (one[row, : lengths[window]] for one in logits)
    answers, begin = [], 0
    for context in windows.contexts:
        rows = slice(begin, begin + len(context.windows))
        best = likeliest(step, starts[rows], ends[rows], context, 1)
        answers.append(context.text[best[0].begin : best[0].end] if best else "")
        begin = rows.stop
    return tuple(answers)


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones after :func:`normalised`, else 0."""
    return float(normalised(answer) in map(normalised, right))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """Return the largest F1 of an answer's words against a right answer, after :func:`normalised`.

    No answer is right, 1, or wrong, 0, as in the script of SQuAD 2.0.
    """
    words, others = normalised(answer).split(), [normalised(text).split() for text in right]
    shared = [sum((Counter(words) & Counter(other)).values()) for other in others]
    return max(
        2 * both / (len(words) + len(other)) if both else float(words == other)
        for both, other in zip(shared, others, strict=True)
    )


def normalised(text: str) -> str:
    """Return a text in lower case without punctuation, articles and double spaces, as in the official script."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())
