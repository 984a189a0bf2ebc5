"""Two runs on one task, and the decision whether to route between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.programs.program import margins
from export.bundle.exported import FULL
from export.bundle.targets import reduced_name
from export.data.examples import HOLDOUT, Examples, held_out
from export.data.tokens import encode, load_tokenizer
from export.finetune.models import Architecture, open_model, open_tuned
from export.finetune.predictions import Predictions, read_matching
from export.finetune.run import task_of
from export.finetune.text_tasks import SentenceTask
from export.models.heads import SequenceClassifier
from export.reduce import routing as policies
from export.reduce.route import Linear, fit, pooled_embeddings
from export.reduce.routing import Diagnosis, Items, Judged, Policy, auc, choose, diagnose, judge, thresholds
from export.training.intervals import Estimate, known_interval
from export.training.runs import read_config

#: The half of the hold-out that thresholds are chosen on.
CHOOSING = "choosing half"
#: Another seed than the hold-out's own, so that its halves are independent of how it was drawn.
_HALVES_SEED = 1


class _Split(NamedTuple):
    """Items of a split, whether the tiers differ on them, and the inputs of routers, [n, …]."""

    name: str
    items: Items
    differing: Array
    margins: Array
    embeddings: Array
    lengths: Array

    def take(self, name: str, rows: Array) -> _Split:
        items = Items(*(column[rows] for column in msgspec.structs.astuple(self.items)))
        return _Split(name, items, *(column[rows] for column in self[2:]))

    @property
    def features(self) -> Array:
        return np.column_stack([self.embeddings, self.lengths])


class Cascade(msgspec.Struct, frozen=True, tag_field="type", tag="cascade"):
    """The lean tier answers first; where its margin is below ``margin``, the full tier answers.

    ``lean`` and ``full`` are the names that ``fewheads export FULL LEAN`` gives to the tiers; a lean run without a
    recorded speed has the name of its directory here. The margin is the likeliest class's probability minus the
    second's.
    """

    lean: str
    full: str
    margin: float


class PolicyReport(msgspec.Struct, frozen=True):
    """A policy on a split.

    Attributes:
        judged: at the threshold that was chosen on the choosing half.
        controls: the accuracy of each control at the same mean cost.
        auc: of the score for "the lean tier is right", with its 95 % interval.
        area: between the policy's curve and the static line, as a mean of accuracy.
    """

    judged: Judged
    controls: dict[str, float]
    auc: Estimate
    area: float


class SplitReport(msgspec.Struct, frozen=True):
    """All policies on a split.

    Attributes:
        differing: share of items that the tiers answer differently.
        costs: mean costs, in units of the full tier's time.
        curves: the accuracy at each of the costs, by the name of the policy or control.
    """

    split: str
    items: int
    lean_accuracy: float
    full_accuracy: float
    differing: float
    costs: tuple[float, ...]
    curves: dict[str, tuple[float, ...]]
    policies: tuple[PolicyReport, ...]


class Route(msgspec.Struct, frozen=True):
    """Result of a comparison: the choosing half, then the dev splits; and the cascade, whether recommended or not."""

    task: str
    full: str
    lean: str
    cost_ratio: float
    diagnosis: Diagnosis
    cascade: Cascade
    splits: tuple[SplitReport, ...]


def route_run(full: str | Path, lean: str | Path, data_dir: str | Path, cost_ratio: float) -> Route:
    """Fit routers, choose their thresholds, and report whether any of them pays.

    Half of the hold-out fits the linear router, the other half chooses thresholds and decides; dev is only reported.
    The linear router reads the lean tier's embeddings; its own time is not counted. The intervals assume that items are
    independent and that a hold-out is as hard as new data. For SST-2 neither holds exactly, see
    :func:`export.data.examples.split_holdout`.

    Args:
        full: a run of ``fewheads finetune``.
        lean: a faster run on the same task, of ``fewheads reduce`` or ``fewheads finetune``.
        cost_ratio: the lean tier's time over the full tier's, for every length.

    Raises:
        UsageError: the ratio is not between 0 and 1, or the runs are not classifiers of texts for one task.
    """
    if not 0 < cost_ratio < 1:
        fix = "Give the inverse of the speed-up that 'fewheads reduce' measured, for example 0.5 for 2 times faster."
        raise UsageError("cost ratio", given=cost_ratio, expected="lean time / full time, between 0 and 1", fix=fix)
    full, lean = Path(full), Path(lean)
    model, architecture, task = _classifier(lean)
    open_tuned(full, task.name)
    tokenizer = load_tokenizer(lean)

    def prepared(split: str, examples: Examples) -> _Split:
        rows = encode(tokenizer, examples, architecture.max_length)
        ours, theirs = (read_matching(run, split, examples.targets) for run in (lean, full))
        cost = np.ones(len(examples.targets))
        items = Items(_right(ours), _right(theirs), cost_ratio * cost, cost)
        differing = ours.answers != theirs.answers
        return _Split(split, items, differing, margins(ours.logits), pooled_embeddings(model, rows), rows.lengths)

    splits = task.examples(data_dir)
    holdout = splits.holdout
    fits = held_out([texts[0] for texts in holdout.texts], 0.5, _HALVES_SEED)
    both = prepared(HOLDOUT, holdout)
    fitting, choosing = both.take("fitting half", fits), both.take(CHOOSING, ~fits)
    enough = np.maximum(fitting.items.lean_right, 1 - fitting.items.full_right)  # lean is right, or both are wrong
    linear, length = fit(fitting.features, enough), fit(fitting.lengths[:, None], enough)

    candidates = [(policy, one) for policy in _policies(choosing, linear) for one in thresholds(policy)]
    chosen = choose(judge(choosing.items, candidates))
    reports = [_report(choosing, linear, length, chosen)]
    for split, examples in splits.dev.items():
        dev = prepared(split, examples)
        fixed = [(policy, chosen[policy.name].threshold) for policy in _policies(dev, linear)]
        reports.append(_report(dev, linear, length, choose(judge(dev.items, fixed))))
    return Route(
        task.name,
        str(full),
        str(lean),
        cost_ratio,
        diagnose(list(chosen.values())),
        Cascade(_lean_name(full, lean), FULL, chosen["cascade"].threshold),
        tuple(reports),
    )


def _lean_name(full: Path, lean: Path) -> str:
    """Return the name that ``fewheads export`` gives to the lean tier, or else the name of its directory."""
    return reduced_name(read_config(full), read_config(lean)) or lean.name.lower()


def _classifier(run: Path) -> tuple[SequenceClassifier, Architecture, SentenceTask]:
    found = open_model(run)
    head, architecture = found.head, found.architecture
    task = task_of(found, run) if architecture else None
    if (
        not isinstance(head, SequenceClassifier)
        or head.regression
        or not architecture
        or not isinstance(task, SentenceTask)
    ):
        fix = "Give runs of 'fewheads finetune' or 'fewheads reduce' on a task with classes."
        expected = "a classifier of texts"
        raise UsageError(f"run {run}", given=Raw("no classifier"), expected=expected, fix=fix)
    return head, architecture, task


def _right(predictions: Predictions) -> Array:
    return np.asarray(predictions.answers == predictions.targets, dtype=np.float64)


def _policies(split: _Split, linear: Linear) -> list[Policy]:
    return [Policy("cascade", split.margins, cascade=True), Policy("linear", linear.scores(split.features))]


def _report(split: _Split, linear: Linear, length: Linear, chosen: dict[str, Judged]) -> SplitReport:
    items = split.items
    routers = _policies(split, linear)
    by_length = Policy("length", length.scores(split.lengths[:, None]))
    controls = [policies.static(items), policies.random(items), by_length, policies.oracle(items)]
    return SplitReport(
        split.name,
        len(split.differing),
        float(items.lean_right.mean()),
        float(items.full_right.mean()),
        float(split.differing.mean()),
        tuple(policies.mean_costs(items).tolist()),
        {policy.name: tuple(policies.curve(items, policy).tolist()) for policy in [*routers, *controls]},
        tuple(_policy_report(items, policy, chosen[policy.name], controls) for policy in routers),
    )


def _policy_report(items: Items, policy: Policy, judged: Judged, controls: Sequence[Policy]) -> PolicyReport:
    cost = judged.mean_cost
    at_same_cost = {one.name: float(policies.at_cost(items, one, cost).right.mean()) for one in controls}
    at_same_cost["shuffled"] = float(policies.shuffled_at_cost(items, policy, cost).right.mean())
    scores = (policy.scores, items.lean_right)
    measured = Estimate(float(auc(*scores)), known_interval(auc, *scores))
    return PolicyReport(judged, at_same_cost, measured, policies.area(items, policy))
