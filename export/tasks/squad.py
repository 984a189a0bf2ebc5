"""SQuAD v1.1: questions, and windows of tokens with parts of their contexts.

Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text". XQuAD has the same format.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Encoding, Tokenizer

from edge.datatypes import Array
from edge.errors import Raw
from export.data.examples import held_out
from export.data.tokens import Encoded
from export.errors import DataError

#: Tokens of a question that are read, as in BERT.
LONGEST_QUESTION = 64
FIX = (
    "Get the files in SQuAD v1.1 JSON from rajpurkar.github.io/SQuAD-explorer, or xquad.en.json of XQuAD, into squad/."
)


class Answer(msgspec.Struct, frozen=True):
    """A right answer: its first character in the context, and its text."""

    answer_start: int
    text: str


class Question(msgspec.Struct, frozen=True):
    """A question on a paragraph of an article; training uses its first answer, evaluation all of them."""

    id: str
    title: str
    context: str
    question: str
    answers: tuple[Answer, ...]


class _Entry(msgspec.Struct):
    id: str
    question: str
    answers: tuple[Answer, ...]


class _Paragraph(msgspec.Struct):
    context: str
    qas: list[_Entry]


class _Article(msgspec.Struct):
    title: str
    paragraphs: list[_Paragraph]


class _File(msgspec.Struct):
    data: list[_Article]


class Windows(msgspec.Struct, frozen=True):
    """Questions with parts of their contexts that fit a model.

    Attributes:
        rows: tokens and segments, and as targets the first and last token of the answer, [n, 2]; 0 and 0, the summary
            token, if the window does not contain all of it.
        offsets: first and last character in the context of each token of a window, [T, 2]; -1 outside of the context.
    """

    rows: Encoded
    questions: Array
    offsets: tuple[Array, ...]


def read(path: str | Path) -> tuple[Question, ...]:
    """Read a file.

    Raises:
        DataError: it is missing or malformed, or an answer is not at its place.
    """
    try:
        articles = msgspec.json.decode(Path(path).read_bytes(), type=_File).data
    except OSError as error:
        raise DataError(f"{path}", given=Raw(error.strerror), expected="a file", fix=FIX) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}", given=Raw(error), expected="SQuAD v1.1 JSON", fix=FIX) from None
    questions = tuple(
        Question(entry.id, article.title, paragraph.context, entry.question, entry.answers)
        for article in articles
        for paragraph in article.paragraphs
        for entry in paragraph.qas
    )
    for question in questions:
        if not question.answers:
            given = Raw("no answer")
            raise DataError(f"{path} question {question.id!r}", given=given, expected="one at least", fix=FIX)
        for answer in question.answers:
            found = question.context[answer.answer_start : answer.answer_start + len(answer.text)]
            if found != answer.text or not found:
                subject = f"{path} question {question.id!r} character {answer.answer_start} of the context"
                raise DataError(subject, given=found, expected=f"the answer {answer.text!r}", fix=FIX)
    return questions


def split_articles(
    questions: Sequence[Question], share: float, seed: int = 0
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Split questions by the hash of their articles' titles, ``share`` of the articles in the second part."""
    held = held_out([question.title for question in questions], share, seed)
    pairs = list(zip(questions, held, strict=True))
    return tuple(question for question, out in pairs if not out), tuple(question for question, out in pairs if out)


def encode_windows(
    tokenizer: Tokenizer, questions: Sequence[Question], *, max_length: int = 384, stride: int = 128
) -> Windows:
    """Tokenise questions with their contexts, and cut long contexts into overlapping windows.

    Args:
        tokenizer: its first token is the summary.
        stride: tokens that neighbouring windows share; fewer than there is room for the context.
    """
    pairs = [(_shortened(tokenizer, question.question), question.context) for question in questions]
    tokenizer.enable_truncation(max_length, stride=stride, strategy="only_second")
    found = [
        (index, window)
        for index, encoding in enumerate(tokenizer.encode_batch(pairs))
        for window in (encoding, *encoding.overflowing)
    ]
    tokenizer.no_truncation()
    offsets = tuple(_context_offsets(window) for _, window in found)
    spans = [_span(offset, questions[index].answers[0]) for (index, _), offset in zip(found, offsets, strict=True)]
    rows = Encoded(
        tuple(np.array(window.ids, dtype=np.int32) for _, window in found),
        tuple(np.array(window.type_ids, dtype=np.int32) for _, window in found),
        np.array(spans, dtype=np.int64).reshape(-1, 2),
    )
    return Windows(rows, np.array([index for index, _ in found], dtype=np.int64), offsets)


def _shortened(tokenizer: Tokenizer, question: str) -> str:
    ends = tokenizer.encode(question, add_special_tokens=False).offsets
    return question if len(ends) <= LONGEST_QUESTION else question[: ends[LONGEST_QUESTION - 1][1]]


def _context_offsets(window: Encoding) -> Array:
    offsets = np.array(window.offsets, dtype=np.int64)
    offsets[np.array([sequence != 1 for sequence in window.sequence_ids])] = -1
    return offsets


def _span(offsets: Array, answer: Answer) -> tuple[int, int]:
    """Return the first and last token of an answer, or 0 and 0 if the window does not contain all of it."""
    begin, end = answer.answer_start, answer.answer_start + len(answer.text)
    context = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(context) or offsets[context[0], 0] > begin or offsets[context[-1], 1] < end:
        return 0, 0
    inside = context[(offsets[context, 1] > begin) & (offsets[context, 0] < end)]
    return (int(inside[0]), int(inside[-1])) if len(inside) else (0, 0)
