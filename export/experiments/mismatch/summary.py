"""From parts to results: a table of all conditions, the effect of each switch, the path, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from export.generate.finetune import BasePrecision
from export.papers.backward.mismatch.parts import BASES, TRAINED
from export.papers.backward.mismatch.records import Begin, Part, Scores
from export.papers.backward.mismatch.results import Effect, Metric, Row, Step
from export.training.intervals import Difference, Sample, points

METRICS: tuple[Metric, ...] = ("tokens", "forced", "written", "answers")


class Condition(NamedTuple):
    """How a fine-tuned model is used and scored; ``merged`` and ``begin`` are those of :class:`Scores`."""

    merged: bool
    begin: Begin
    metric: Metric


class Switch(NamedTuple):
    """A change from one condition to another."""

    name: str
    before: Condition
    after: Condition


#: Answers by the model as it was trained, which the first switches change.
_AS_TRAINED = Condition(False, "once", "answers")
_FORCED = Condition(False, "once", "forced")
SWITCHES = (
    Switch("merged into the FP32 base", _AS_TRAINED, Condition(True, "once", "answers")),
    Switch("begin token twice, places kept", _AS_TRAINED, Condition(False, "twice, places kept", "answers")),
    Switch("begin token twice", _AS_TRAINED, Condition(False, "twice", "answers")),
    Switch("merged, and begin token twice", _AS_TRAINED, Condition(True, "twice", "answers")),
    Switch("written freely, not teacher-forced", _FORCED, Condition(False, "once", "written")),
    Switch("whole completions, not tokens", Condition(False, "once", "tokens"), _FORCED),
)
#: From the accuracy in training to that in use; the last step is from the examples trained on to the first test split.
_PATH = (
    ("tokens, teacher-forced", Condition(False, "once", "tokens")),
    ("counting whole completions", Condition(False, "once", "forced")),
    ("writing freely", Condition(False, "once", "answers")),
    ("merging into the FP32 base", Condition(True, "once", "answers")),
    ("the second begin token, places kept", Condition(True, "twice, places kept", "answers")),
    ("the places that it moves", Condition(True, "twice", "answers")),
)
_LAST = "questions that were not trained on"


class Summary:
    """Results of some parts.

    Args:
        tests: names of the test splits.
    """

    def __init__(self, parts: Sequence[Part], tests: Sequence[str]) -> None:
        self._parts = {base: [part for part in parts if part.base == base] for base in BASES}
        self._splits = (TRAINED, *tests)
        self._samples: dict[tuple[BasePrecision, str, Condition], Sample] = {}

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table."""
        return tuple(self._rows())

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """All switches, for the adapters of each base."""
        return tuple(
            Effect(base, switch.name, {split: self._change(base, switch, split) for split in self._splits})
            for base in BASES
            if self._parts[base]
            for switch in SWITCHES
        )

    @cached_property
    def path(self) -> tuple[Step, ...]:
        """See :class:`Results`."""
        if not self._parts["nf4"]:
            return ()
        places = [(name, TRAINED, condition) for name, condition in _PATH]
        places.append((_LAST, self._splits[1], _PATH[-1][1]))
        samples = [self._sample("nf4", split, condition) for _, split, condition in places]
        changes = [None, *(after.minus(before, same_runs=True) for before, after in pairwise(samples))]
        return tuple(
            Step(name, split, sample.mean(), change)
            for (name, split, _), sample, change in zip(places, samples, changes, strict=True)
        )

    @cached_property
    def agreements(self) -> tuple[int, int]:
        """The numbers ``agreements`` and ``completions`` of :class:`Results`."""
        pairs = [
            (tokens == hits) == written
            for parts in self._parts.values()
            for part in parts
            for scores in part.scores
            for tokens, hits, written in zip(scores.tokens, scores.hits, scores.written, strict=True)
        ]
        return sum(pairs), len(pairs)

    def verdict(self) -> str:
        """Return which steps of the path cost how much, and the largest."""
        if not self.path:
            return "Nothing is compared yet."
        first, *others = self.path
        last = others[-1]
        lost = 100 * (first.accuracy.value - last.accuracy.value)
        steps = "; ".join(f"{step.name} {points(step.change)}" for step in others if step.change)
        proven = [step for step in others if step.change and step.change.interval[1] < 0]
        largest = min(proven, key=lambda step: step.change.value if step.change else 0.0, default=None)
        agreements, completions = self.agreements
        return (
            f"Adapters trained on an NF4 base predict {100 * first.accuracy.value:.1f} % of the tokens in training. "
            f"Merged into the FP32 base and asked with the begin token twice, they answer "
            f"{100 * last.accuracy.value:.1f} % of {last.split} rightly, {lost:.1f} points less. In points: {steps}. "
            + (f"The largest loss is by {largest.name}. " if largest else "No step loses more than chance. ")
            + f"Teacher forcing and free writing agree on {agreements:,} of {completions:,} whole completions."
        )

    def _rows(self) -> Iterator[Row]:
        # Splits in the outer loop, because the resamples of one size are kept at a time.
        for split in self._splits:
            for base, parts in self._parts.items():
                for scores in (one for part in parts[:1] for one in part.scores if one.split == split):
                    values = {
                        metric: self._sample(base, split, Condition(scores.merged, scores.begin, metric)).mean()
                        for metric in METRICS
                    }
                    yield Row(base, scores.merged, scores.begin, split, len(scores.tokens), len(parts), values)

    def _change(self, base: BasePrecision, switch: Switch, split: str) -> Difference:
        before, after = (self._sample(base, split, condition) for condition in (switch.before, switch.after))
        return after.minus(before, same_runs=True)

    def _sample(self, base: BasePrecision, split: str, condition: Condition) -> Sample:
        key = base, split, condition
        if key not in self._samples:
            found = [_scores(part, split, condition) for part in self._parts[base]]
            values = np.array([_VALUES[condition.metric](one) for one in found], float)
            weights = found[0].tokens if condition.metric == "tokens" else np.ones(values.shape[1])
            self._samples[key] = Sample(values, np.array(weights, float))
        return self._samples[key]


def _scores(part: Part, split: str, condition: Condition) -> Scores:
    wanted = split, condition.merged, condition.begin
    return next(one for one in part.scores if (one.split, one.merged, one.begin) == wanted)


_VALUES: Mapping[Metric, Callable[[Scores], Sequence[float]]] = {
    "tokens": lambda scores: scores.hits,
    "forced": lambda scores: [one == other for one, other in zip(scores.tokens, scores.hits, strict=True)],
    "written": lambda scores: scores.written,
    "answers": lambda scores: scores.answered,
}
