"""From parts to results: means over seeds with intervals, paired differences, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from export.generate.answers import same_answer
from export.generate.base import BaseIdentity
from export.papers.backward.compare.methods import FROZEN, HEAD, METHODS
from export.papers.backward.compare.records import Part, Settings
from export.papers.backward.compare.tasks import Task
from export.training.intervals import Difference, Mean, Sample
from export.training.provenance import Processor

#: Differences of equal answers are no larger.
_ROUNDING = 1e-9
#: What the head has to beat: the frozen model, and all that trains but other forms of the head.
CONTROLS = tuple(
    method.name for method in METHODS if method is FROZEN or (method.make and not method.name.startswith(HEAD.name))
)


class Row(msgspec.Struct, frozen=True):
    """A method on a task.

    Attributes:
        rate: the learning rate that was best on the hold-out.
        cross_entropy: nats per token; None for another way to write texts of the frozen model.
        head_cross_entropy: the head's cross-entropy minus this method's, on the same examples; None for the head.
        head_exact_match: the same of the exact match.
        others: means over seeds of all further metrics of the test split.
    """

    task: str
    method: str
    seeds: int
    parameters: int
    rate: float | None
    cross_entropy: Mean | None
    exact_match: Mean
    head_cross_entropy: Difference | None
    head_exact_match: Difference | None
    others: dict[str, float]


def rows_of(tasks: Sequence[Task], parts: Sequence[Part]) -> tuple[Row, ...]:
    """Return the table: the methods that have a part, task by task."""
    return tuple(row for task in tasks for row in _rows(task, [part for part in parts if part.task == task.name]))


class Outcome(msgspec.Struct, frozen=True):
    """On how many tasks the head's interval is apart from 0 against a control, of those compared so far."""

    control: str
    lower_cross_entropy: int
    higher_cross_entropy: int
    higher_exact_match: int
    lower_exact_match: int
    tasks: int

    @property
    def described(self) -> str:
        """The outcome in words: a metric counts if more than half of the tasks speak for one side on balance."""
        loss = _sign(self.lower_cross_entropy - self.higher_cross_entropy, self.tasks)
        match = _sign(self.higher_exact_match - self.lower_exact_match, self.tasks)
        if loss * match < 0:
            return f"wins in {'cross-entropy' if loss > 0 else 'exact match'} and loses in the other"
        return {1: "wins", 0: "makes no clear difference", -1: "loses"}[int(np.sign(loss + match))]


class Results(msgspec.Struct, frozen=True):
    """All results.

    Attributes:
        missing: parts that are still to be computed.
    """

    base: BaseIdentity
    settings: Settings
    missing: int
    verdict: str
    outcomes: tuple[Outcome, ...]
    rows: tuple[Row, ...]
    processor: Processor


def outcomes(rows: Sequence[Row]) -> tuple[Outcome, ...]:
    """Return what the intervals of the head say against each control; some rows may be missing yet."""
    found = []
    for control in CONTROLS:
        of = [row for row in rows if row.method == control and row.head_cross_entropy and row.head_exact_match]
        if of:
            losses = _counts([row.head_cross_entropy for row in of])
            higher, lower = reversed(_counts([row.head_exact_match for row in of]))
            found.append(Outcome(control, *losses, higher, lower, len(of)))
    return tuple(found)


def verdict(rows: Sequence[Row]) -> str:
    """Return the outcomes in words."""
    by_words: dict[str, list[str]] = {}
    for outcome in outcomes(rows):
        by_words.setdefault(outcome.described, []).append(outcome.control)
    parts = [f"{words} against: {', '.join(controls)}" for words, controls in by_words.items()]
    return f"Backward attention {'; '.join(parts)}." if parts else "Nothing is compared yet."


def _sign(balance: int, tasks: int) -> int:
    return int(np.sign(balance)) if 2 * abs(balance) > tasks else 0


def _counts(differences: Sequence[Difference | None]) -> tuple[int, int]:
    """Return how many are below 0, and above, with their whole interval."""
    intervals = [one.interval for one in differences if one]
    return sum(high < -_ROUNDING for _, high in intervals), sum(low > _ROUNDING for low, _ in intervals)


def _rows(task: Task, parts: Sequence[Part]) -> Iterator[Row]:
    by_method = {method.name: [part for part in parts if part.method == method.name] for method in METHODS}
    losses: dict[str, Sample] = {}
    matches: dict[str, Sample] = {}
    for name, group in by_method.items():
        if group:
            answers = [
                [same_answer(one, right.answer) for one, right in zip(part.answers, task.test, strict=False)]
                for part in group
            ]
            matches[name] = Sample(np.array(answers, float), np.ones(len(answers[0])))
            if group[0].losses:
                losses[name] = Sample(np.array([part.losses for part in group]), np.array(group[0].tokens, float))
    for name in matches:
        first = by_method[name][0]
        yield Row(
            task.name,
            name,
            len(by_method[name]),
            first.parameters,
            first.rate,
            losses[name].mean() if name in losses else None,
            matches[name].mean(),
            _head_minus(name, losses),
            _head_minus(name, matches),
            _means([part.measures for part in by_method[name]]),
        )


def _head_minus(name: str, samples: Mapping[str, Sample]) -> Difference | None:
    if name == HEAD.name or name not in samples or HEAD.name not in samples:
        return None
    return samples[HEAD.name].minus(samples[name])


def _means(runs: Sequence[Sequence[Measure]]) -> dict[str, float]:
    names = [measure.metric for measure in runs[0] if measure.metric not in ("cross_entropy", "exact_match")]
    values = [{measure.metric: measure.value for measure in run} for run in runs]
    return {name: float(np.mean([of_run[name] for of_run in values if name in of_run])) for name in names}
