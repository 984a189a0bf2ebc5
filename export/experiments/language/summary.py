"""From parts to results: means over seeds with intervals, paired differences, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from export.experiments.language.methods import ADAPTER, FROZEN, HEAD, METHODS
from export.experiments.language.records import Part, Settings
from export.experiments.language.tasks import Task
from export.intervals import Difference, Sample, middle
from export.language.answers import same_answer
from export.language.base import BaseIdentity
from export.processor import Processor

Interval = tuple[float, float]
#: Differences of equal answers are no larger.
_ROUNDING = 1e-9
#: What others are compared with.
REFERENCES = (FROZEN.name, ADAPTER.name)


class Value(msgspec.Struct, frozen=True):
    """A mean over test examples and seeds; its 95 % interval resamples both.

    Attributes:
        against: this minus the value of each of :data:`REFERENCES`, on the same examples.
    """

    value: float
    interval: Interval
    against: dict[str, Difference]


class Row(msgspec.Struct, frozen=True):
    """A method on a task.

    Attributes:
        rate: the learning rate that was best on the hold-out.
        cross_entropy: nats per token; None for another way to write texts of the frozen model.
        others: means over seeds of all further metrics of the test split.
    """

    task: str
    method: str
    seeds: int
    parameters: int
    rate: float | None
    cross_entropy: Value | None
    exact_match: Value
    others: dict[str, float]


class Results(msgspec.Struct, frozen=True):
    """All results.

    Attributes:
        missing: parts that are still to be computed.
    """

    base: BaseIdentity
    settings: Settings
    missing: int
    verdict: str
    rows: tuple[Row, ...]
    processor: Processor


def rows_of(tasks: Sequence[Task], parts: Sequence[Part]) -> tuple[Row, ...]:
    """Return the table: the methods that have a part, task by task."""
    return tuple(row for task in tasks for row in _rows(task, [part for part in parts if part.task == task.name]))


def verdict(rows: Sequence[Row]) -> str:
    """Return what the intervals of the head say against the references; some rows may be missing yet."""
    heads = [row for row in rows if row.method == HEAD.name]
    sentences = []
    for reference in REFERENCES:
        lower, higher, of = _counts([row.cross_entropy for row in heads if row.cross_entropy], reference)
        worse, better, _ = _counts([row.exact_match for row in heads], reference)
        if of:
            sentences.append(
                f"Against the {reference}, backward attention {_outcome(lower - higher, better - worse)}: its "
                f"cross-entropy is lower on {lower} of {of} tasks and higher on {higher}, its exact match higher on "
                f"{better} and lower on {worse}."
            )
    return " ".join(sentences) or "Nothing is compared yet."


def _outcome(cross_entropy: int, exact_match: int) -> str:
    signs = {int(np.sign(cross_entropy)), int(np.sign(exact_match))} - {0}
    if not signs:
        return "makes no difference that counts"
    if len(signs) == 2:
        return f"wins in {'cross-entropy' if cross_entropy > 0 else 'exact match'} and loses in the other"
    return "wins" if signs == {1} else "loses"


def _counts(values: Sequence[Value], reference: str) -> tuple[int, int, int]:
    """Return on how many tasks a value is lower, and higher, with an interval apart from 0, and the number of tasks."""
    intervals = [value.against[reference].interval for value in values if reference in value.against]
    lower = sum(high < -_ROUNDING for _, high in intervals)
    return lower, sum(low > _ROUNDING for low, _ in intervals), len(intervals)


def _rows(task: Task, parts: Sequence[Part]) -> Iterator[Row]:
    by_method = {method.name: [part for part in parts if part.method == method.name] for method in METHODS}
    losses: dict[str, Sample] = {}
    matches: dict[str, Sample] = {}
    for kind, (name, group) in enumerate(by_method.items()):
        if group:
            answers = [
                [same_answer(one, right.answer) for one, right in zip(part.answers, task.test, strict=False)]
                for part in group
            ]
            matches[name] = Sample(np.array(answers, float), np.ones(len(answers[0])), kind)
            if group[0].losses:
                losses[name] = Sample(np.array([part.losses for part in group]), np.array(group[0].tokens, float), kind)
    for name in matches:
        first = by_method[name][0]
        yield Row(
            task.name,
            name,
            len(by_method[name]),
            first.parameters,
            first.rate,
            _value(name, losses) if name in losses else None,
            _value(name, matches),
            _means([part.measures for part in by_method[name]]),
        )


def _value(name: str, samples: Mapping[str, Sample]) -> Value:
    ours = samples[name]
    against = {
        reference: Difference(ours.mean - samples[reference].mean, middle(ours.drawn - samples[reference].drawn))
        for reference in REFERENCES
        if reference in samples and reference != name
    }
    return Value(ours.mean, middle(ours.drawn), against)


def _means(runs: Sequence[Sequence[Measure]]) -> dict[str, float]:
    names = [measure.metric for measure in runs[0] if measure.metric not in ("cross_entropy", "exact_match")]
    values = [{measure.metric: measure.value for measure in run} for run in runs]
    return {name: float(np.mean([of_run[name] for of_run in values if name in of_run])) for name in names}
