"""Questions in a user's files: a table with question, context and answer, or SQuAD's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.errors import Raw
from export.data import squad
from export.data.squad import Answer, Question
from export.data.tables import DataTable, read_table
from export.errors import DataError

#: Columns of an answer: its text, or as Hugging Face's ``datasets`` has SQuAD, ``{"text": […], "answer_start": […]}``.
_ANSWERS = ("answers", "answer")
_START = "answer_start"
_FIX = "Give each answer as the context spells it, or an empty one for a question without an answer."


def is_questions(paths: Sequence[Path]) -> bool:
    """Return whether files hold questions, by the columns of the first: ``question``, ``context`` and an answer.

    Raises:
        DataError: it cannot be read.
    """
    return paths[0].suffix.lower() == ".json" or _columns(read_table(paths[0])) is not None


def read_questions(paths: Iterable[Path]) -> tuple[Question, ...]:
    """Read the questions of files; those with the same context have the same title.

    Raises:
        DataError: a file cannot be read, lacks a column, or has an answer that is not in its context.
    """
    return tuple(question for path in paths for question in _read(path))


def _read(path: Path) -> Iterable[Question]:
    if path.suffix.lower() == ".json":
        return squad.read(path, no_answer=True)
    table = read_table(path)
    columns = _columns(table)
    if columns is None:
        expected = f"question, context, and one of {' and '.join(_ANSWERS)}"
        given = Raw(f"the columns {', '.join(table.columns)}")
        raise DataError(f"{path}", given=given, expected=expected, fix="Rename the columns.")
    cells = [table.values(columns[name]) for name in ("question", "context", "answer")]
    starts = table.values(columns[_START]) if _START in columns else [None] * table.rows
    rows = enumerate(zip(*cells, starts, strict=True))
    return [_question(f"{path.name}:{row + 1}", table.place(row), *row_cells) for row, row_cells in rows]


def _columns(table: DataTable) -> Mapping[str, str] | None:
    """Return the columns of question, context, answer and perhaps its start; None of another table."""
    lower = {name.lower(): name for name in table.columns}
    answers = [lower[name] for name in _ANSWERS if name in lower]
    if not {"question", "context"} <= lower.keys() or len(answers) != 1 or "label" in lower:
        return None
    return {"answer": answers[0], **{name: lower[name] for name in ("question", "context", _START) if name in lower}}


def _question(name: str, place: str, question: Any, context: Any, answer: Any, start: Any) -> Question:
    for column, text in (("question", question), ("context", context)):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{place} column {column}", given=text, expected="a text", fix="Fill the cell.")
    texts: Any = [] if answer in (None, "") else [answer]
    starts: Any = [start] * len(texts)
    if isinstance(answer, dict):
        texts, starts = answer.get("text"), answer.get(_START)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place} column answer", given=Raw(type(answer).__name__), expected="a text", fix=_FIX)
    starts = [None] * len(texts) if starts is None else starts
    if not isinstance(starts, list) or len(starts) != len(texts):
        subject, expected = f"{place} column answer {_START}", f"a list with the start of each of {len(texts)} texts"
        raise DataError(subject, given=starts, expected=expected, fix="Leave it out for first occurrences.")
    answers = tuple(Answer(_start(place, context, *one), one[0]) for one in zip(texts, starts, strict=True) if one[0])
    return Question(name, context, context, question, answers)


def _start(place: str, context: str, text: str, start: Any) -> int:
    """Return where an answer begins, its first occurrence if ``start`` is None, or an empty cell of CSV."""
    try:
        begin = context.find(text) if start in (None, "") else int(start)
    except (TypeError, ValueError):
        begin = -1
    if begin < 0 or not context.startswith(text, begin):
        where = "" if start in (None, "") else f" from character {start} on"
        subject = f"{place} answer"
        raise DataError(subject, given=text, expected=f"a part of its context{where}", fix=_FIX)
    return begin
