"""Records of calculators, and the results of their models over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.papers.calculator.benchmark import PAPER_SCORE, SCORE, Errors, baseline, paper_score, score
from export.training.intervals import Mean, across_seeds, over_seeds, wilson

#: Answers less truths by form, such as ``a - b``: row for a, column for b, both from -10 to 10.
Grids: TypeAlias = dict[str, list[list[float]]]
#: The other side of tests against the seeds of the frozen baseline.
FROZEN = "the frozen baseline"


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of a run.

    Attributes:
        trainer: how it was trained; runs of one model and trainer are its seeds.
        seed: None for a network that is constructed.
        errors, paper_long: of calculators of sums; see :mod:`export.papers.calculator.benchmark`.
        grids: of the same.
    """

    model: str
    trainer: str
    seed: int | None
    parameters: int
    measures: tuple[Measure, ...]
    errors: Errors | None = None
    paper_long: float | None = None
    grids: Grids = {}

    @property
    def name(self) -> str:
        """The model's name for people."""
        return self.model.removeprefix("calculator-")


class ModelResult(msgspec.Struct, frozen=True):
    """Results of a calculator of sums.

    Attributes:
        seeds: their number; 1 for a network that is constructed.
        measures: means over the seeds with Student's intervals, or of one seed with intervals over the items. The
            scores are geometric means.
        paper_long: what paper 000's code reports as the error on long expressions, if it meets these answers.
        paper_scores: the least and the largest score by the paper's formula, if one seed of the baseline after the
            other is the denominator.
        against: by model, the ratio of the scores, and p of Welch's t-test of their logarithms, two-sided; None where a
            model has one seed, or no scores differ.
        costs: where they were measured.
    """

    name: str
    parameters: int
    seeds: int
    measures: tuple[Measure, ...]
    paper_long: float
    paper_scores: tuple[float, float]
    against: dict[str, tuple[float, float | None]]
    costs: dict[str, float | Mean] = {}

    def measure(self, metric: str, split: str) -> Measure:
        """Return one of the measures."""
        return next(one for one in self.measures if (one.metric, one.split) == (metric, split))


class Variation(msgspec.Struct, frozen=True):
    """FNN2, trained in another way with a seed; ``measures`` are empty if its loss grew beyond all numbers."""

    factor: str
    setting: str
    parameters: int | None
    measures: dict[str, float]


class Trial(msgspec.Struct, frozen=True):
    """A trial of the search: units of each layer, and the least mean squared error on validation."""

    search: str
    units: list[int]
    dropout: float
    state: str
    value: float


class View(msgspec.Struct, frozen=True):
    """The errors of a model by operands."""

    model: str
    grids: Grids


def grouped(records: Mapping[str, RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the seeds of each model by its name for people, in their order; another training has another number."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records.values():
        seeds = groups.setdefault((record.name, record.trainer), [])
        if not seeds or record.seed is not None:  # networks that are constructed are all alike
            seeds.append(record)
    named: dict[str, list[RunRecord]] = {}
    for (name, _), seeds in groups.items():
        number = 1 + sum(other.partition(" (")[0] == name for other in named)
        named[name if number == 1 else f"{name} (training {number})"] = seeds
    return named


def results_of(groups: Mapping[str, Sequence[RunRecord]]) -> list[ModelResult]:
    """Return the results of calculators of sums, by the seeds of each."""
    from scipy.stats import gmean  # the help of the commands needs no SciPy, which a board does not have

    base = baseline()
    errors = {name: [one.errors for one in runs if one.errors] for name, runs in groups.items()}
    logs = {name: np.log([score(one, base.mean) for one in of_runs]) for name, of_runs in errors.items()}
    logs[FROZEN] = np.log([score(one, base.mean) for one in base.seeds.values()])
    results = []
    for name, runs in groups.items():
        papers = [gmean([paper_score(one, seed) for one in errors[name]]) for seed in base.seeds.values()]
        results.append(
            ModelResult(
                name,
                runs[0].parameters,
                len(runs),
                tuple(pooled([run.measures for run in runs])),
                float(np.mean([run.paper_long for run in runs])),
                (float(min(papers)), float(max(papers))),
                {other: _against(logs[name], logs[other]) for other in logs if other != name},
            )
        )
    return results


def pooled(runs: Sequence[Sequence[Measure]]) -> Iterator[Measure]:
    """Yield means over seeds; of scores geometric ones, and shares with intervals that cover Wilson's over the items.

    Seeds that are right everywhere do not differ, and the items are no more for it.
    """
    for measure, *same in zip(across_seeds(runs) if len(runs) > 1 else runs[0], *runs, strict=True):
        bounds, value = measure.interval, measure.value
        if measure.metric in (SCORE, PAPER_SCORE) and len(runs) > 1:
            logs = over_seeds([float(np.log(one.value)) for one in same])
            value, bounds = float(np.exp(logs.value)), tuple(np.exp(logs.interval).tolist())
        elif measure.metric in ("exact_match", "right"):
            ends = *wilson(round(value * measure.n), measure.n), *(bounds or ())
            bounds = max(min(ends), 0.0), min(max(ends), 1.0)
        yield msgspec.structs.replace(measure, value=value, interval=bounds)


def _against(ours: Array, theirs: Array) -> tuple[float, float | None]:
    ratio = float(np.exp(ours.mean() - theirs.mean()))
    if min(len(ours), len(theirs)) < 2 or max(ours.std(), theirs.std()) == 0:
        return ratio, None
    from scipy.stats import ttest_ind

    return ratio, float(ttest_ind(ours, theirs, equal_var=False).pvalue)
