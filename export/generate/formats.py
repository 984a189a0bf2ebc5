r"""Data sets of questions and answers, in one text format, and the answers in its texts.

=============  ==================================================  ==========================================
format         PATH                                                where it comes from
=============  ==================================================  ==========================================
gsm8k          a JSONL file with ``question`` and ``answer``       github.com/openai/grade-school-math
openmath       a JSONL or Parquet file, or a directory of them     huggingface.co/datasets/nvidia/OpenMathInstruct-2
mathematics    a text file with questions and answers on           github.com/google-deepmind/mathematics_dataset, or
               alternating lines, or a directory of them           export/papers/backward/generate_mathematics.py
calculator     a split: train, val, in_range, out_of_range, long   :mod:`export.data.expressions`
=============  ==================================================  ==========================================

The text of an example is ``Question: …\nAnswer: <solution> #### <answer>``. A model completes ``Question: …\nAnswer:``,
and only the rest has a loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from edge.errors import Raw, UsageError
from export.data import expressions as calculator
from export.errors import DataError

#: Stands before the answer, once in each text, as in GSM8K.
MARK = "####"
#: Longer texts are not read as numbers; their digits would take seconds.
_MAX_CHARS = 64
_SIGN = r"(\$?[+-]?|[+-]\$)"
_THOUSANDS = re.compile(rf"{_SIGN}\d{{1,3}}(,\d{{3}})+(\.\d*)?%?", re.ASCII)
_NUMBER = re.compile(rf"{_SIGN} *(?:(\d+) +(?=\d+/))?(\d+(?:\.\d*)?|\.\d+)(?:/(\d+(?:\.\d*)?))?%?", re.ASCII)
#: What LaTeX and typography write in numbers, and the same in plain characters.
_PLAIN = {"\N{MINUS SIGN}": "-", "\\$": "$", "\\%": "%", "{,}": ",", "\\!": ""}
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", re.ASCII)
_CALCULATION = re.compile(r"<<[^<>]*>>")

RowT = TypeVar("RowT", bound=msgspec.Struct)


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


def parse_answer(text: str) -> str | None:
    """Return what follows the first :data:`MARK` on its line, normalised; None without a mark or anything after it."""
    _, mark, rest = text.partition(MARK)
    line = rest.partition("\n")[0].partition(MARK)[0]
    return normalised(line) or None if mark else None


def normalised(answer: str) -> str:
    """Return an answer with single spaces, and a number without thousands separators: ``1,234`` becomes ``1234``.

    Lists and pairs such as ``(1,234)`` keep their commas.
    """
    text = " ".join(answer.split())
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def parse_number(answer: str | None) -> Fraction | None:
    r"""Return the number that an answer is, exactly: ``-3``, ``0.25``, ``5/4``, ``3 1/2``, ``$12`` or ``50%``, the 50.

    LaTeX is read, too, such as ``\frac{1}{2}``, ``\$12`` or ``1{,}234``. None for anything else, such as a list.
    """
    if answer is None or len(answer) > _MAX_CHARS:
        return None
    for written, plain in _PLAIN.items():
        answer = answer.replace(written, plain)
    match = _NUMBER.fullmatch(normalised(_FRACTION.sub(r" \1/\2", answer)).rstrip("."))
    if match is None or (match[4] and not Fraction(match[4])):
        return None
    number = Fraction(match[2] or 0) + Fraction(match[3]) / Fraction(match[4] or 1)
    return -number if "-" in match[1] else number


def same_answer(given: str | None, right: str) -> bool:
    """Return whether two answers are the same text or the same number, so that ``-4.0`` is ``-4``."""
    number = parse_number(given)
    return given == right or (number is not None and number == parse_number(right))


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
        DataError: there is no file, or one of them is malformed or has no example; Parquet without pyarrow.
    """
    if source.format == "calculator":
        return {f"calculator/{source.path}": tuple(islice(_calculator(source.path), limit))}
    reader, endings = _FILES[source.format]
    path = Path(source.path)
    files = sorted(file for file in path.rglob("*") if file.suffix in endings) if path.is_dir() else [path]
    if not files or not path.exists():
        given = Raw("a directory without such files" if path.is_dir() else "nothing there")
        fix = f"Get the data as the documentation of {__name__} says, or correct the path."
        raise DataError(f"data {path}", given=given, expected=f"files that end in {' or '.join(endings)}", fix=fix)
    by_file = {}
    for file in files:
        examples = tuple(islice(reader(file), limit))
        if not examples:
            raise _malformed(file, "line 1", Raw("the end of the file"), "an example")
        by_file[f"{file.absolute().parent.name}/{file.stem}"] = examples
    return by_file


class _Gsm8k(msgspec.Struct):
    question: str
    answer: str


class _OpenMath(msgspec.Struct):
    problem: str
    generated_solution: str
    expected_answer: str


def _gsm8k(path: Path) -> Iterator[Example]:
    for line, row in _json_rows(path, _Gsm8k):
        answer = parse_answer(row.answer)
        if answer is None:
            raise _malformed(path, line, row.answer[-40:], f"an answer that ends with {MARK!r} and a number")
        yield Example(row.question, _CALCULATION.sub("", row.answer.partition(MARK)[0]).strip(), answer)


def _openmath(path: Path) -> Iterator[Example]:
    rows = _parquet_rows if path.suffix == ".parquet" else _json_rows
    for line, row in rows(path, _OpenMath):
        answer = normalised(row.expected_answer)
        if not answer:
            raise _malformed(path, line, row.expected_answer, "an expected_answer that is not blank")
        yield Example(row.problem, row.generated_solution, answer)


def _mathematics(path: Path) -> Iterator[Example]:
    lines = _lines(path)
    for line, question in lines:
        _, answer = next(lines, ("", ""))
        if not question.strip() or not answer.strip():
            given = Raw("a question without an answer" if question.strip() else "an empty line")
            raise _malformed(path, line, given, "a question, and its answer on the next line")
        yield Example(question, "", normalised(answer))


def _calculator(split: str) -> Iterator[Example]:
    splits = calculator.load()
    if split not in splits:
        fix = "Give calculator:train, for example."
        raise DataError("calculator's split", given=split, expected=f"one of {', '.join(splits)}", fix=fix)
    for expression, truth in zip(splits[split].expressions, splits[split].truth, strict=True):
        yield Example(expression, "", f"{truth:g}")


#: Readers of a file, and the ends of the names of the files in a directory.
_FILES: Mapping[str, tuple[Callable[[Path], Iterator[Example]], tuple[str, ...]]] = {
    "gsm8k": (_gsm8k, (".jsonl",)),
    "openmath": (_openmath, (".jsonl", ".parquet")),
    "mathematics": (_mathematics, (".txt",)),
}
FORMATS = (*_FILES, "calculator")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file in UTF-8, without ends and byte order mark, behind names such as ``line 3``."""

    def text(name: str, line: bytes, encoding: str) -> str:
        try:
            return line.decode(encoding).rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise _malformed(path, name, line[error.start : error.end], "text in UTF-8") from None

    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                name = f"line {number}"
                yield name, text(name, line, "utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        fix = "Correct the path or its permissions."
        raise DataError(f"{path}", given=Raw(error.strerror), expected="a file to read", fix=fix) from None


def _json_rows(path: Path, kind: type[RowT]) -> Iterator[tuple[str, RowT]]:
    """Yield the objects of a file, one a line; blank lines have none."""
    for number, line in _lines(path):
        if line.strip():
            try:
                row = msgspec.json.decode(line, type=kind)
            except msgspec.DecodeError as error:  # ValidationError is one
                raise _malformed(path, number, Raw(error), _texts_of(kind)) from None
            yield number, row


def _parquet_rows(path: Path, kind: type[RowT]) -> Iterator[tuple[str, RowT]]:
    """Yield the rows of a file, of which only the fields of ``kind`` are read."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fix = "Install it with pip install pyarrow, or give the data as JSONL."
        raise DataError(f"{path}", given=Raw("Parquet"), expected="the package pyarrow", fix=fix) from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(columns=list(kind.__struct_fields__)):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", msgspec.convert(row, kind)
    except (OSError, KeyError, pyarrow.ArrowException, msgspec.ValidationError) as error:
        raise _malformed(path, f"row {max(number, 1)}", Raw(error), _texts_of(kind)) from None


def _malformed(path: Path, line: str, given: object, expected: str) -> DataError:
    fix = f"Repair or remove the {line.split()[0]}, or get the file again."
    return DataError(f"{path} {line}", given=given, expected=expected, fix=fix)


def _texts_of(kind: type[msgspec.Struct]) -> str:
    return f"the texts {', '.join(kind.__struct_fields__)}"
