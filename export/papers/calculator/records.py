"""Records of calculators, and the results of their models over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from export.papers.calculator.benchmark import PAPER_SCORE, SCORE, baseline, score
from export.training.intervals import Mean, across_seeds

#: Answers less truths by form, such as ``a - b``: row for a, column for b, both from -10 to 10.
Grids: TypeAlias = dict[str, list[list[float]]]
#: The other side of tests against the seeds of the frozen baseline.
FROZEN = "the frozen baseline"


class TrainingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of a run; of each calculator of sums, the committed records have the means over its seeds.

    Attributes:
        trainer: how it was trained; runs of one model and trainer are its seeds.
        seed: None for a network that is constructed, and for such means.
        paper_long, grids: of calculators of sums; see :mod:`export.papers.calculator.benchmark`.
        paper_scores: of the same, the scores by the paper's formula, if one seed of the frozen baseline after the other
            is the denominator; of such means, the least and the largest.
        costs: where they were measured.
    """

    model: str
    trainer: str
    seed: int | None
    parameters: int
    measures: tuple[Measure, ...]
    paper_long: float | None = None
    paper_scores: tuple[float, ...] = ()
    grids: Grids = {}
    costs: dict[str, float | Mean] = {}

    @property
    def name(self) -> str:
        """The model's name for people."""
        return self.model.removeprefix("calculator-")


class ModelResult(NamedTuple):
    """Results of a calculator of sums.

    Attributes:
        measures: means over the seeds; the scores are geometric means.
        paper_long: what paper 000's code reports as the error on long expressions, if it meets these answers.
        paper_scores: the least and the largest, see :class:`TrainingRecord`.
        against: by model, the ratio of the scores, and p of Welch's t-test of their logarithms, two-sided; None where a
            model has one seed, or no scores differ.
    """

    name: str
    parameters: int
    measures: tuple[Measure, ...]
    paper_long: float
    paper_scores: tuple[float, float]
    against: dict[str, tuple[float, float | None]]
    costs: dict[str, float | Mean]

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


def grouped(records: Mapping[str, TrainingRecord]) -> dict[str, list[TrainingRecord]]:
    """Return the seeds of each model by its name for people, in their order; another training has another number."""
    groups: dict[tuple[str, str], list[TrainingRecord]] = {}
    for record in records.values():
        seeds = groups.setdefault((record.name, record.trainer), [])
        if not seeds or record.seed is not None:  # networks that are constructed are all alike
            seeds.append(record)
    named: dict[str, list[TrainingRecord]] = {}
    for (name, _), seeds in groups.items():
        number = 1 + sum(other.partition(" (")[0] == name for other in named)
        named[name if number == 1 else f"{name} (training {number})"] = seeds
    return named


def results_of(groups: Mapping[str, Sequence[TrainingRecord]]) -> list[ModelResult]:
    """Return the results of calculators of sums, by the seeds of each."""
    from scipy.stats import gmean  # the help of the commands needs no SciPy, which a board does not have

    base = baseline()
    logs = {name: _log_scores(runs) for name, runs in groups.items()}
    logs[FROZEN] = _spread([score(one, base.mean) for one in base.seeds.values()])
    results = []
    for name, runs in groups.items():
        papers = gmean([run.paper_scores for run in runs])
        results.append(
            ModelResult(
                name,
                runs[0].parameters,
                pooled(runs),
                float(np.mean([run.paper_long for run in runs])),
                (float(min(papers)), float(max(papers))),
                {other: _against(logs[name], logs[other]) for other in logs if other != name},
                runs[0].costs,
            )
        )
    return results


def pooled(runs: Sequence[TrainingRecord]) -> tuple[Measure, ...]:
    """Return the measures of a model over its seeds; means of scores are geometric."""
    return across_seeds([run.measures for run in runs], (SCORE, PAPER_SCORE)) if len(runs) > 1 else runs[0].measures


def _log_scores(runs: Sequence[TrainingRecord]) -> tuple[float, float, int]:
    """Return the mean of the scores' logarithms, their standard deviation, and the number of seeds."""
    from scipy.stats import t

    first, *others = (next(one for one in run.measures if one.metric == SCORE) for run in runs)
    if others or first.seeds == 1 or not first.interval:
        return _spread([one.value for one in (first, *others)])
    half = float(np.ptp(np.log(first.interval))) / 2  # Student's, of a mean over seeds
    return float(np.log(first.value)), float(half * first.seeds**0.5 / t.ppf(0.975, first.seeds - 1)), first.seeds


def _spread(scores: Sequence[float]) -> tuple[float, float, int]:
    return float(np.log(scores).mean()), float(np.log(scores).std(ddof=1)) if len(scores) > 1 else 0.0, len(scores)


def _against(here: tuple[float, float, int], there: tuple[float, float, int]) -> tuple[float, float | None]:
    ratio = float(np.exp(here[0] - there[0]))
    if min(here[2], there[2]) < 2 or max(here[1], there[1]) == 0:
        return ratio, None
    from scipy.stats import ttest_ind_from_stats

    return ratio, float(ttest_ind_from_stats(*here, *there, equal_var=False).pvalue)
