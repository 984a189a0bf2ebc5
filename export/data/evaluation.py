"""Sets on which embeddings are evaluated: pairs with a similarity, and questions with the texts that answer them.

Data are not part of the project: :data:`SOURCES` says where a user gets them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import Raw
from export.data import squad
from export.data.examples import HOLDOUT_SHARE, Examples, hash_order
from export.data.glue import read_glue, read_score
from export.data.tables import read_tsv
from export.data.unlabelled import read_texts
from export.errors import DataError

#: What each group of sets needs below the data directory, and where a user gets it.
SOURCES = {
    "sts": "sts/YEAR.NAME.test.tsv (from data/sts/semeval-sts/all of github.com/brmson/dataset-sts), sts/SICK.test.txt "
    "(SICK's annotated test part, of SemEval 2014's task 1) or glue/STS-B/dev.tsv (gluebenchmark.com/tasks)",
    "retrieval": "glue/QNLI/dev.tsv (from gluebenchmark.com/tasks) or squad/xquad.en.json (from "
    "github.com/google-deepmind/xquad)",
    "probes": "glue/SST-2, glue/CoLA or glue/MRPC with train.tsv and dev.tsv (from gluebenchmark.com/tasks)",
}
#: Fewest letters and digits of a sentence that is kept out of a training.
_LEAST_LETTERS = 12
#: Most documents of retrieval that are drawn from a text; the most of its texts, half of those that a training holds
#: out; and the fewest that retrieval is measured with.
MOST_PASSAGES, _DOCUMENTS_SHARE, LEAST_PASSAGES = 20_000, HOLDOUT_SHARE / 2, 100
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
#: The set of SICK's test part.
SICK = "SICK test"
#: Columns of a score and two sentences: of the STS tasks, which have no header, and of SICK; of STS-B, the sentences.
_STS = ("score", "first sentence", "second sentence")
_SICK_COLUMNS = ("relatedness_score", "sentence_A", "sentence_B")
_STSB = ("sentence1", "sentence2")


class Questions(NamedTuple):
    """A task of retrieval: questions, distinct documents, and the index of the one that answers, [n]."""

    questions: tuple[str, ...]
    documents: tuple[str, ...]
    answers: Array


def pair_sets(data_dir: Path) -> dict[str, Callable[[], Examples]]:
    """Return functions that read the sets of pairs whose files are there, by their names.

    They are the STS tasks, those of a year as one set, STS-B's dev and train, and SICK's test part.
    """
    sts, sick = data_dir / "sts", data_dir / "sts" / "SICK.test.txt"
    years: dict[str, list[Path]] = {}
    for path in sorted(sts.glob("20??.*.test.tsv")):
        years.setdefault(f"STS{path.name[2:4]}", []).append(path)
    readers: dict[str, Callable[[], Examples]] = {
        year: partial(_read_pairs, paths, header=_STS) for year, paths in years.items()
    }
    for split in ("dev", "train"):
        path = data_dir / "glue" / "STS-B" / f"{split}.tsv"
        if path.is_file():
            readers[f"STS-B {split}"] = partial(read_glue, path, _STSB, "score", ())
    if sick.is_file():
        readers[SICK] = partial(_read_pairs, [sick])
    return readers


def question_sets(data_dir: Path) -> dict[str, Callable[[], Questions]]:
    """Return functions that read the sets of questions whose files are there, by their names: QNLI's dev, and XQuAD."""
    qnli, xquad = data_dir / "glue" / "QNLI" / "dev.tsv", data_dir / "squad" / "xquad.en.json"
    readers: dict[str, Callable[[], Questions]] = {}
    if qnli.is_file():
        readers["QNLI dev"] = partial(_read_qnli, qnli)
    if xquad.is_file():
        readers["XQuAD"] = partial(_read_xquad, xquad)
    return readers


def has_evaluation(data_dir: Path) -> bool:
    """Return whether a file of an evaluation set is below a data directory."""
    return bool(pair_sets(data_dir) or question_sets(data_dir))


def evaluation_texts(data_dir: Path) -> frozenset[str]:
    """Return every text of the sets that are there, to keep them out of the texts of a training.

    They include STS-B's train, on which choices are made, its test, and each sentence of a paragraph of XQuAD.

    Raises:
        DataError: no set is there, or a file is malformed.
    """
    pairs, questions = pair_sets(data_dir), question_sets(data_dir)
    if not pairs and not questions:
        raise missing(data_dir, "sts", "retrieval")
    texts = {text for read in pairs.values() for both in read().texts for text in both}
    for task in (read() for read in questions.values()):
        texts.update(task.questions, task.documents)
        texts.update(sentence for document in task.documents for sentence in _SENTENCE_END.split(document))
    test = data_dir / "glue" / "STS-B" / "test.tsv"
    if test.is_file():  # without scores, so no set to measure on
        table = read_tsv(test, skips_short_rows=True)
        texts.update(cell for name in _STSB for cell in table.columns.get(name, ()))
    return frozenset(text for text in texts if text.strip())


def has_evaluated(texts: Iterable[tuple[str, ...]], evaluated: Iterable[str]) -> Array:
    """Return the mask of texts of which a sentence is evaluated, whatever its case, accents and punctuation, [n].

    Sentences of few letters, such as an answer of yes, do not count.

    Args:
        evaluated: such as :func:`evaluation_texts`.
    """
    known = {short for text in evaluated if len(short := plain(text)) >= _LEAST_LETTERS}
    return np.array(
        [any(plain(part) in known for text in row for part in (text, *_SENTENCE_END.split(text))) for row in texts],
        dtype=bool,
    )


def plain(text: str) -> str:
    """Return a text without case, accents, punctuation and spaces, by which equal sentences are recognised."""
    return "".join(char for char in unicodedata.normalize("NFKD", text.casefold()) if char.isalnum())


def held_out_passages(lines: Sequence[str], number: int) -> Array:
    """Return the mask of the lines that are documents of retrieval, [n] of bool.

    They are the first distinct ones in the order of their hashes, at most a twentieth. A training that holds a tenth of
    the same lines out by their hash, as a restoration does, never sees them. Empty lines are none of them.
    """
    distinct = tuple(dict.fromkeys(text for line in lines if (text := line.strip())))
    most = min(number, int(_DOCUMENTS_SHARE * len(distinct)))
    chosen = {distinct[index] for index in hash_order(distinct)[:most]}
    return np.array([line.strip() in chosen for line in lines], dtype=bool)


class Passages(NamedTuple):
    """Documents of retrieval, drawn from a text, and how many more have a sentence of an evaluation."""

    texts: tuple[str, ...]
    left_out: int


def read_passages(path: Path, number: int, evaluated: Iterable[str]) -> Passages:
    """Draw documents from a file by :func:`held_out_passages`, without those that have an evaluated sentence.

    Raises:
        DataError: the file cannot be read, or the documents are fewer than :data:`LEAST_PASSAGES`.
    """
    lines = [text for (text,) in read_texts(path, pair=False)]
    drawn = [line for line, out in zip(lines, held_out_passages(lines, number), strict=True) if out]
    known = has_evaluated([(text,) for text in drawn], evaluated)
    texts = tuple(text for text, out in zip(drawn, known, strict=True) if not out)
    if len(texts) < LEAST_PASSAGES:
        given = Raw(f"{len(texts)} documents, drawn from {len(lines)} texts")
        expected = f"{LEAST_PASSAGES} at least, from {round(LEAST_PASSAGES / _DOCUMENTS_SHARE)} different texts"
        fix = "Give a larger file of plain text, with a passage in each line, or leave --documents out."
        raise DataError(f"--documents {path}", given=given, expected=expected, fix=fix)
    return Passages(texts, int(known.sum()))


def missing(data_dir: Path, *groups: str) -> DataError:
    """Return the error that no file of some groups of :data:`SOURCES` is below a data directory."""
    given = Raw("none of their files" if data_dir.is_dir() else "no such directory")
    expected, fix = " or ".join(SOURCES[group] for group in groups), "Name the directory above them with --data-dir."
    return DataError(f"evaluation sets in {data_dir}", given=given, expected=expected, fix=fix)


def _read_pairs(files: Sequence[Path], header: Sequence[str] = ()) -> Examples:
    """Read files as one set; pairs without a score, which SemEval's annotators left out, are no part of it."""
    score, first, second = header or _SICK_COLUMNS
    texts, scores = [], []
    for path in files:
        table, fix = read_tsv(path, header=header), f"Get {SOURCES['sts']}."
        if not table.columns.keys() >= {score, first, second}:
            given, expected = Raw(", ".join(table.columns)), f"a header with {score}, {first} and {second}"
            raise DataError(f"{path} line 1", given=given, expected=expected, fix=fix)
        rows = zip(*(table.columns[name] for name in (score, first, second)), strict=True)
        for row, (cell, *both) in enumerate(rows):
            if cell.strip():
                scores.append(read_score(cell, score, table.place(row), fix))
                texts.append(tuple(text.strip() for text in both))
    return Examples(tuple(texts), np.array(scores, dtype=np.float32))


def _read_qnli(path: Path) -> Questions:
    examples = read_glue(path, ("question", "sentence"), "label", ("entailment", "not_entailment"))
    answered = [texts for texts, target in zip(examples.texts, examples.targets, strict=True) if target == 0]
    return _questions(answered, [sentence for _, sentence in examples.texts])


def _read_xquad(path: Path) -> Questions:
    pairs = [(entry.question, entry.context) for entry in squad.read(path)]
    return _questions(pairs, [context for _, context in pairs])


def _questions(answered: Sequence[tuple[str, ...]], documents: Iterable[str]) -> Questions:
    distinct = tuple(dict.fromkeys(documents))
    index = {document: number for number, document in enumerate(distinct)}
    answers = np.array([index[answer] for _, answer in answered], dtype=np.int64)
    return Questions(tuple(question for question, _ in answered), distinct, answers)
