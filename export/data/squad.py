"""SQuAD: questions, and windows of tokens with parts of their contexts.

Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text". XQuAD has the same format.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from edge.bundles.spans import Context, cut
from edge.bundles.steps import WindowShape
from edge.datatypes import Array
from edge.errors import Raw
from export.data.examples import held_out
from export.data.tokens import Encoded
from export.errors import DataError

#: Tokens of a question that are read, as in BERT.
LONGEST_QUESTION = 64
#: Tokens of a window with room for the longest question, three special tokens, and 29 of the context.
_USUAL_LENGTH = LONGEST_QUESTION + 3 + 29
#: The official files, and a free one without a training set, of whose articles a quarter becomes dev.
_TRAIN, _DEV, _ALONE = "train-v1.1.json", "dev-v1.1.json", "xquad.en.json"
_DEV_SHARE, _DEV_SEED = 0.25, 1  # another seed than the hold-out's, so that neither split depends on the other
_FIX = (
    "Get the files in SQuAD v1.1 JSON from rajpurkar.github.io/SQuAD-explorer, or xquad.en.json of XQuAD, into squad/."
)
_FIX_OWN = "Repair the file, or give a table; a question without an answer has no answers, and is_impossible is true."


class Answer(msgspec.Struct, frozen=True):
    """A right answer: its first character in the context, and its text."""

    answer_start: int
    text: str


class Question(msgspec.Struct, frozen=True):
    """A question on a paragraph of an article; training uses its first answer, evaluation all of them.

    Without answers, as in SQuAD 2.0, the right one is none.
    """

    id: str
    title: str
    context: str
    question: str
    answers: tuple[Answer, ...]


class _Entry(msgspec.Struct):
    id: str
    question: str
    answers: tuple[Answer, ...]
    is_impossible: bool = False


class _Paragraph(msgspec.Struct):
    context: str
    qas: list[_Entry]


class _Article(msgspec.Struct):
    title: str
    paragraphs: list[_Paragraph]


class _File(msgspec.Struct):
    data: list[_Article]


class Windows(Encoded, frozen=True):
    """Questions with parts of their contexts that fit a model.

    The targets are the first and last token of the answer, [n, 2]; 0 and 0, the summary token, if the window does not
    contain all of it.

    Attributes:
        question_rows: index of the question of each window, [n].
        offsets: first and last character in the context of each token of a window, [T, 2]; -1 outside of the context.
        contexts: of the questions, with their windows in the order of the rows.
    """

    questions: tuple[Question, ...]
    question_rows: Array
    offsets: tuple[Array, ...]
    contexts: tuple[Context, ...]


def read_splits(directory: Path) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return the questions for training, with the hold-out, and those of dev, without a common article.

    Raises:
        DataError: a file is missing or malformed, or has fewer than three articles to split.
    """
    if (directory / _TRAIN).exists():
        return _read_several(directory / _TRAIN), read(directory / _DEV)
    if (directory / _ALONE).exists():
        return split_articles(_read_several(directory / _ALONE), _DEV_SHARE, _DEV_SEED)
    given = Raw("neither" if directory.is_dir() else "no such directory")
    raise DataError(f"{directory}", given=given, expected=f"{_TRAIN} and {_DEV}, or {_ALONE}", fix=_FIX)


def _read_several(path: Path) -> tuple[Question, ...]:
    questions = read(path)
    articles = len({question.title for question in questions})
    if articles < 3:  # for training set, hold-out and dev
        raise DataError(f"{path}", given=Raw(f"{articles} articles"), expected="three at least", fix=_FIX)
    return questions


def read(path: str | Path, *, no_answer: bool = False) -> tuple[Question, ...]:
    """Read a file.

    Args:
        no_answer: whether questions may have no answer, as in SQuAD 2.0.

    Raises:
        DataError: it is missing or malformed, or an answer is not at its place, or missing.
    """
    fix = _FIX_OWN if no_answer else _FIX
    try:
        articles = msgspec.json.decode(Path(path).read_bytes(), type=_File).data
    except OSError as error:
        raise DataError(f"{path}", given=Raw(error.strerror), expected="a file", fix=fix) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        expected = "SQuAD v1.1 or v2.0 JSON" if no_answer else "SQuAD v1.1 JSON"
        raise DataError(f"{path}", given=Raw(error), expected=expected, fix=fix) from None
    entries = [
        (Question(entry.id, article.title, paragraph.context, entry.question, entry.answers), entry.is_impossible)
        for article in articles
        for paragraph in article.paragraphs
        for entry in paragraph.qas
    ]
    for question, is_impossible in entries:
        subject = f"{path} question {question.id!r}"
        if not question.answers and not (no_answer and is_impossible):
            raise DataError(subject, given=Raw("no answer"), expected="one at least", fix=fix)
        for answer in question.answers:
            given = question.context[answer.answer_start : answer.answer_start + len(answer.text)]
            if given != answer.text or not given:
                subject += f" character {answer.answer_start} of the context"
                raise DataError(subject, given=given, expected=f"the answer {answer.text!r}", fix=fix)
    return tuple(question for question, _ in entries)


def split_articles(
    questions: Sequence[Question], share: float, seed: int = 0
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Split questions by the hash of their articles' titles, ``share`` of the articles in the second part."""
    held = held_out([question.title for question in questions], share, seed)
    pairs = list(zip(questions, held, strict=True))
    return tuple(question for question, out in pairs if not out), tuple(question for question, out in pairs if out)


def window_shape(max_length: int) -> WindowShape:
    """Return how contexts are cut into windows of ``max_length`` tokens: BERT's of 384 share 128.

    They share at most half of the context beside a long question, which has a third of windows below 96 tokens.
    """
    question = LONGEST_QUESTION if max_length >= _USUAL_LENGTH else max(max_length // 3, 1)
    stride = max(min(max_length // 3, (max_length - question - 3) // 2), 0)
    return WindowShape(question_tokens=question, stride=stride)


def encode_windows(
    tokenizer: Tokenizer, questions: Sequence[Question], *, max_length: int = 384, shape: WindowShape
) -> Windows:
    """Tokenise questions with their contexts, and cut long contexts into overlapping windows, as a device does.

    The tokenizer's first token is the summary.
    """
    rows, tokens, segments, offsets, spans, contexts = [], [], [], [], [], []
    encodings = tokenizer.encode_batch([(question.question, question.context) for question in questions])
    for row, (question, encoding) in enumerate(zip(questions, encodings, strict=True)):
        ids, types = (np.array(values, np.int32) for values in (encoding.ids, encoding.type_ids))
        of_windows, context = cut(question.context, encoding, max_length, shape)
        contexts.append(context)
        for indices, window in zip(of_windows, context.windows, strict=True):
            rows.append(row)
            tokens.append(ids[indices])
            segments.append(types[indices])
            of_context = np.full((len(indices), 2), -1, np.int64)
            inside = slice(window.first, window.first + window.length)
            of_context[window.position : window.position + window.length] = context.offsets[inside]
            offsets.append(of_context)
            spans.append(_span(of_context, question.answers[0]) if question.answers else (0, 0))
    return Windows(
        tuple(tokens),
        tuple(segments),
        np.array(spans, dtype=np.int64).reshape(-1, 2),
        tuple(questions),
        np.array(rows, dtype=np.int64),
        tuple(offsets),
        tuple(contexts),
    )


def _span(offsets: Array, answer: Answer) -> tuple[int, int]:
    """Return the first and last token of an answer, or 0 and 0 if the window does not contain all of it."""
    begin, end = answer.answer_start, answer.answer_start + len(answer.text)
    context = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(context) or offsets[context[0], 0] > begin or offsets[context[-1], 1] < end:
        return 0, 0
    inside = context[(offsets[context, 1] > begin) & (offsets[context, 0] < end)]
    return (int(inside[0]), int(inside[-1])) if len(inside) else (0, 0)
