"""The sets of an evaluation, read once for all runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from edge.errors import Raw
from edge.files import sha256
from export.data.evaluation import (
    MOST_PASSAGES,
    Passages,
    Questions,
    evaluation_texts,
    missing,
    pair_sets,
    question_sets,
    read_passages,
)
from export.data.examples import Examples, limited
from export.errors import DataError
from export.finetune.text_tasks import TASKS
from export.report.embeddings import GROUPS, Group

#: Tasks of linear probes, and the most texts of each that they are trained and measured on.
_PROBES, _MOST_TRAIN, _MOST_HELD_OUT = ("SST-2", "CoLA", "MRPC"), 4000, 2000


class Probe(NamedTuple):
    """A task of linear probes: its metric, and the texts to train and to measure on."""

    metric: str
    train: Examples
    holdout: Examples


class Sets(NamedTuple):
    """Sets by name, those of groups that were not asked for are empty.

    Attributes:
        groups: those that are measured.
        passages: further documents of all questions; none without a file of them.
    """

    groups: tuple[Group, ...]
    pairs: Mapping[str, Examples]
    questions: Mapping[str, Questions]
    passages: Passages
    probes: Mapping[str, Probe]

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of the texts of each set."""
        return {name: sha256("\n".join(chain(*parts)).encode()) for name, parts in self._parts.items()}

    @property
    def texts(self) -> int:
        """How many texts are embedded for each run."""
        return sum(len({*part}) for parts in self._parts.values() for part in parts)

    @property
    def _parts(self) -> dict[str, list[Sequence[str]]]:
        """What is embedded at a time, by the name of the set."""
        parts: dict[str, list[Sequence[str]]] = {name: [columns(one)] for name, one in self.pairs.items()}
        parts |= {name: [one.questions, one.documents] for name, one in self.questions.items()}
        parts |= {name: [columns(one.train), columns(one.holdout)] for name, one in self.probes.items()}
        return parts | ({"passages": [self.passages.texts]} if self.passages.texts else {})


def columns(examples: Examples) -> list[str]:
    """Return the first texts of all items, then the second ones of pairs."""
    return [*chain(*zip(*examples.texts, strict=True))]


def read_sets(data_dir: Path, documents: Path | None, only: Collection[Group], runs: int) -> Sets:
    """Read the sets of some groups; of all that are there where ``only`` is empty.

    Args:
        documents: a file of passages, see :func:`export.data.evaluation.read_passages`.
        runs: a single run is not mixed with others.

    Raises:
        DataError: a group of ``only`` has no file, or no group has one; a file is malformed; a set has nothing to
            measure; or the passages are too few.
    """
    wanted = [group for group in GROUPS if group in (only or GROUPS) and (group != "mixed" or runs > 1)]
    pairs = {name: read() for name, read in pair_sets(data_dir).items()} if "sts" in wanted else {}
    asked = {"retrieval", "mixed"} & {*wanted}
    questions = {name: read() for name, read in question_sets(data_dir).items()} if asked else {}
    probes = _read_probes(data_dir) if "probes" in wanted else {}
    _check_measurable(pairs, questions, probes)
    there = {"sts": pairs, "retrieval": questions, "probes": probes, "mixed": questions}
    absent = [group for group in wanted if not there[group]]
    if absent and (only or absent == wanted):
        raise missing(data_dir, *dict.fromkeys("retrieval" if group == "mixed" else group for group in absent))
    passages = Passages((), 0)
    if documents is not None and questions:
        passages = read_passages(documents, MOST_PASSAGES, evaluation_texts(data_dir))
    groups = tuple(group for group in wanted if group not in absent)
    return Sets(groups, pairs, questions, passages, probes)


def _check_measurable(
    pairs: Mapping[str, Examples], questions: Mapping[str, Questions], probes: Mapping[str, Probe]
) -> None:
    needs = (
        *((name, "different scores", {*one.targets.tolist()}, 2) for name, one in pairs.items()),
        *((name, "questions with an answer", one.questions, 1) for name, one in questions.items()),
        *((name, "classes to train a probe on", {*one.train.targets.tolist()}, 2) for name, one in probes.items()),
    )
    for name, things, found, least in needs:
        if len(found) < least:
            fix = "Get the whole set again, or choose other groups with --only."
            raise DataError(name, given=Raw(f"{len(found)} {things}"), expected=f"{least} at least", fix=fix)


def _read_probes(data_dir: Path) -> dict[str, Probe]:
    probes = {}
    for name in _PROBES:
        task, folder = TASKS[name], data_dir / "glue" / name
        if (folder / "train.tsv").is_file() and (folder / "dev.tsv").is_file():
            splits = task.examples(data_dir)
            train, holdout = limited(splits.train, _MOST_TRAIN), limited(splits.holdout, _MOST_HELD_OUT)
            probes[name] = Probe(task.headline, train, holdout)
    return probes
