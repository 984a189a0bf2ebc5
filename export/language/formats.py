r"""Data sets of questions and answers, in one text format.

=============  ==================================================  ==========================================
format         PATH                                                where it comes from
=============  ==================================================  ==========================================
gsm8k          a JSONL file with ``question`` and ``answer``       github.com/openai/grade-school-math
openmath       a JSONL or Parquet file, or a directory of them     huggingface.co/datasets/nvidia/OpenMathInstruct-2
mathematics    a text file with questions and answers on           github.com/google-deepmind/mathematics_dataset, or
               alternating lines, or a directory of them           export/papers/backward/generate_mathematics.py
calculator     a split: train, val, in_range, out_of_range, long   :mod:`export.papers.calculator.data`
=============  ==================================================  ==========================================

The text of an example is ``Question: …\nAnswer: <solution> #### <answer>``. A model completes ``Question: …\nAnswer:``,
and only the rest has a loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.errors import Raw, UsageError
from export.errors import DataError
from export.generate.answers import MARK, normalised, parse_answer
from export.generate.rows import json_lines, lines, malformed, parquet_rows
from export.papers.calculator import data as calculator

_CALCULATION = re.compile(r"<<[^<>]*>>")


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
        given = Raw("a directory without such files" if path.is_dir() else "nothing there")
        fix = f"Get the data as the documentation of {__name__} says, or correct the path."
        raise DataError(f"data {path}", given=given, expected=f"files that end in {' or '.join(endings)}", fix=fix)
    found = {}
    for file in files:
        examples = tuple(islice(reader(file), limit))
        if not examples:
            raise malformed(file, "line 1", Raw("the end of the file"), "an example")
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
    for place, row in json_lines(path, _Gsm8k):
        answer = parse_answer(row.answer)
        if answer is None:
            raise malformed(path, place, row.answer[-40:], f"an answer that ends with {MARK!r} and a number")
        yield Example(row.question, _CALCULATION.sub("", row.answer.partition(MARK)[0]).strip(), answer)


def _openmath(path: Path) -> Iterator[Example]:
    rows = parquet_rows if path.suffix == ".parquet" else json_lines
    for place, row in rows(path, _OpenMath):
        answer = normalised(row.expected_answer)
        if not answer:
            raise malformed(path, place, row.expected_answer, "an expected_answer that is not blank")
        yield Example(row.problem, row.generated_solution, answer)


def _mathematics(path: Path) -> Iterator[Example]:
    found = lines(path)
    for place, question in found:
        _, answer = next(found, ("", ""))
        if not question.strip() or not answer.strip():
            given = Raw("a question without an answer" if question.strip() else "an empty line")
            raise malformed(path, place, given, "a question, and its answer on the next line")
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
