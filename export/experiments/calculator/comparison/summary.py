"""Results of models from the answers of their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import scipy.stats

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.papers.calculator.benchmark import (
    PAPER_SCORE,
    SCORE,
    baseline,
    errors_of,
    measured,
    paper_long,
    paper_score,
    score,
    with_items,
)
from export.papers.calculator.comparison.results import Against, Cost, ModelResult
from export.papers.calculator.data import Split
from export.papers.calculator.runs import Run
from export.papers.calculator.specs import SPECS
from export.training.intervals import across_seeds, over_seeds

#: The other side of tests against the seeds of the frozen baseline.
FROZEN = "the frozen baseline"


def summary_of(
    groups: Mapping[str, Sequence[Run]], splits: Mapping[str, Split], costs: Mapping[str, Cost]
) -> tuple[ModelResult, ...]:
    """Return the results of models.

    Args:
        groups: runs by model; they differ in their seed.
        costs: by model.
    """
    base = baseline()
    errors = {name: [errors_of(run.values, splits) for run in runs] for name, runs in groups.items()}
    logs = {name: np.log([score(one, base.mean) for one in of_runs]) for name, of_runs in errors.items()}
    logs[FROZEN] = np.log([score(one, base.mean) for one in base.seeds.values()])
    found = []
    for name, runs in groups.items():
        papers = [scipy.stats.gmean([paper_score(one, seed) for one in errors[name]]) for seed in base.seeds.values()]
        config = runs[0].config
        found.append(
            ModelResult(
                name=name,
                runs=tuple(run.path.name for run in runs),
                parameters=runs[0].parameters,
                seeds=len(runs),
                measures=_pooled([measured(run.values, splits) for run in runs]),
                paper=None if config.arguments else SPECS[config.model].paper,
                paper_long=float(np.mean([paper_long(run.values, splits) for run in runs])),
                paper_scores=(float(min(papers)), float(max(papers))),
                against=tuple(_against(logs[name], other, logs[other]) for other in logs if other != name),
                cost=costs[name],
            )
        )
    return tuple(found)


def reference_of(groups: Mapping[str, Sequence[Run]]) -> str:
    """Return the model that others are compared with: FNN2, the best of paper 000, or else the first."""
    return "fnn2" if "fnn2" in groups else next(iter(groups))


def _pooled(runs: Sequence[tuple[Measure, ...]]) -> tuple[Measure, ...]:
    if len(runs) == 1:
        return runs[0]
    return tuple(_measure(measure, same) for measure, *same in zip(across_seeds(runs), *runs, strict=True))


def _measure(mean: Measure, runs: Sequence[Measure]) -> Measure:
    """Return a mean over seeds as it is reported: of scores the geometric mean, with the interval of its logarithm."""
    if mean.metric in (SCORE, PAPER_SCORE):
        logs = over_seeds([float(np.log(one.value)) for one in runs])
        low, high = np.exp(logs.interval).tolist()
        return msgspec.structs.replace(mean, value=float(np.exp(logs.value)), interval=(low, high))
    return with_items(mean) if mean.metric == "exact_match" else mean


def _against(ours: Array, name: str, theirs: Array) -> Against:
    ratio = float(np.exp(ours.mean() - theirs.mean()))
    if min(len(ours), len(theirs)) < 2 or max(ours.std(), theirs.std()) == 0:
        return Against(name, ratio, None)
    sides = [value for one in (ours, theirs) for value in (one.mean(), one.std(ddof=1), len(one))]
    return Against(name, ratio, float(scipy.stats.ttest_ind_from_stats(*sides, equal_var=False).pvalue))
