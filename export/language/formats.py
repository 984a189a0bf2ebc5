r"""Data sets of questions and answers, in one text format.

=============  ==================================================  ==========================================
format         PATH                                                where it comes from
=============  ==================================================  ==========================================
gsm8k          a JSONL file with ``question`` and ``answer``       github.com/openai/grade-school-math
openmath       a JSONL or Parquet file, or a directory of them     huggingface.co/datasets/nvidia/OpenMathInstruct-2
mathematics    a text file with questions and answers on           github.com/google-deepmind/mathematics_dataset, or
               alternating lines, or a directory of them           export/language/generate_mathematics.py
calculator     a split: train, val, in_range, out_of_range, long   :mod:`export.calculator.data`
=============  ==================================================  ==========================================

The text of an example is ``Question: …\nAnswer: <solution> #### <answer>``. A model completes ``Question: …\nAnswer:``,
and only the rest has a loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edge.errors import Literally, UsageError
from export.calculator import data as calculator
from export.errors import DataError
from export.language.answers import MARK, normalised, parse_answer

_CALCULATION = re.compile(r"<<[^<>]*>>")
_FIX = "Repair or remove the line, or get the file again."


class Example(msgspec.Struct, frozen=True):
    """A question, the way to its answer, which may be empty, and the answer."""

    prompt: str
    solution: str
    answer: str

    @property
    def text_before(self) -> str:
        """What a model is given."""
        return prompt_text(self.prompt)

    @property
    def completion(self) -> str:
        """What a model learns to write, with one mark of the answer."""
        solution = self.solution.replace(MARK, "").strip()
        return f"{' ' if solution else ''}{solution} {MARK} {self.answer}"


class Source(NamedTuple):
    """Data to read: the name of their format, and a path or the name of a split."""

    format: str
    path: str

    def __str__(self) -> str:
        return f"{self.format}:{self.path}"


def prompt_text(prompt: str) -> str:
    """Return a question as a model is given it."""
    return f"Question: {prompt}\nAnswer:"


def source_of(text: str) -> Source:
    """Return the source that ``FORMAT:PATH`` names.

    Raises:
        UsageError: there is no such format, or no path.
    """
    name, _, path = text.partition(":")
    if name not in FORMATS or not path:
        expected = f"FORMAT:PATH with a format of {', '.join(FORMATS)}"
        raise UsageError("--data", given=text, expected=expected, fix="Give gsm8k:data/train.jsonl, for example.")
    return Source(name, path)


def read_source(source: Source, limit: int | None = None) -> dict[str, tuple[Example, ...]]:
    """Return the examples of each file by its name, at most ``limit`` of a file.

    Raises:
        DataError: there is no file, or one of them is malformed or has no example.
    """
    if source.format == "calculator":
        return {f"calculator/{source.path}": tuple(islice(_calculator(source.path), limit))}
    reader, endings = _FILES[source.format]
    path = Path(source.path)
    files = sorted(file for file in path.rglob("*") if file.suffix in endings) if path.is_dir() else [path]
    if not files or not path.exists():
        given = Literally("a directory without such files" if path.is_dir() else "nothing there")
        fix = f"Get the data as the documentation of {__name__} says, or correct the path."
        raise DataError(f"data {path}", given=given, expected=f"files that end in {' or '.join(endings)}", fix=fix)
    found = {}
    for file in files:
        examples = tuple(islice(reader(file), limit))
        if not examples:
            raise _malformed(file, 1, Literally("the end of the file"), "an example")
        found[f"{file.absolute().parent.name}/{file.stem}"] = examples
    return found


class _Gsm8k(msgspec.Struct):
    question: str
    answer: str


class _OpenMath(msgspec.Struct):
    problem: str
    generated_solution: str
    expected_answer: str


def _gsm8k(path: Path) -> Iterator[Example]:
    for number, row in _json_lines(path, _Gsm8k):
        answer = parse_answer(row.answer)
        if answer is None:
            raise _malformed(path, number, row.answer[-40:], f"an answer that ends with {MARK!r} and a number")
        yield Example(row.question, _CALCULATION.sub("", row.answer.partition(MARK)[0]).strip(), answer)


def _openmath(path: Path) -> Iterator[Example]:
    for _, row in _parquet_rows(path) if path.suffix == ".parquet" else _json_lines(path, _OpenMath):
        yield Example(row.problem, row.generated_solution, normalised(row.expected_answer))


def _mathematics(path: Path) -> Iterator[Example]:
    lines = _lines(path)
    for number, question in lines:
        _, answer = next(lines, (0, ""))
        if not question or not answer:
            given = Literally("an empty line" if not question else "a question without an answer")
            raise _malformed(path, number, given, "a question, and its answer on the next line")
        yield Example(question, "", normalised(answer))


def _calculator(split: str) -> Iterator[Example]:
    splits = calculator.load()
    if split not in splits:
        fix = "Give calculator:train, for example."
        raise DataError("calculator's split", given=split, expected=f"one of {', '.join(splits)}", fix=fix)
    for expression, truth in zip(splits[split].expressions, splits[split].truth, strict=True):
        yield Example(expression, "", f"{truth:g}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, _text(path, number, line)
    except OSError as error:
        fix = "Correct the path or its permissions."
        raise DataError(f"{path}", given=Literally(error.strerror), expected="a file to read", fix=fix) from None


def _json_lines(path: Path, kind: type[Any]) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path):
        yield number, _decoded(path, number, line, kind)


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _malformed(path, number, line[error.start : error.end], "text in UTF-8") from None


def _decoded(path: Path, number: int, line: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise _malformed(path, number, Literally(error), _fields(kind)) from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, _OpenMath]]:
    try:
        import pyarrow  # type: ignore[import-not-found]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found]
    except ImportError:
        fix = "Install it with pip install pyarrow, or give the data as JSONL."
        raise DataError(f"{path}", given=Literally("Parquet"), expected="the package pyarrow", fix=fix) from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(columns=_OpenMath.__struct_fields__):
            for row in batch.to_pylist():
                number += 1
                yield number, msgspec.convert(row, _OpenMath)
    except (OSError, KeyError, pyarrow.ArrowException, msgspec.ValidationError) as error:
        raise _malformed(path, number, Literally(error), _fields(_OpenMath)) from None


def _fields(kind: type[Any]) -> str:
    return f"the texts {', '.join(kind.__struct_fields__)}"


def _malformed(path: Path, number: int, given: object, expected: str) -> DataError:
    return DataError(f"{path} line {number}", given=given, expected=expected, fix=_FIX)


#: Readers of a file, and the ends of the names of the files in a directory.
_FILES: Mapping[str, tuple[Callable[[Path], Iterator[Example]], tuple[str, ...]]] = {
    "gsm8k": (_gsm8k, (".jsonl",)),
    "openmath": (_openmath, (".jsonl", ".parquet")),
    "mathematics": (_mathematics, (".txt",)),
}
FORMATS = (*_FILES, "calculator")
