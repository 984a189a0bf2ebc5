"""Two runs on one task, and the decision whether to route between them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.programs.program import margins
from export.bundle.exported import FULL
from export.bundle.new_bundles import reduced_name
from export.data.examples import HOLDOUT, Examples
from export.data.tokens import Rows, encode, load_tokenizer, sorted_batches
from export.finetune.models import open_model, open_tuned
from export.finetune.predictions import read_matching
from export.finetune.run import split_of, task_of
from export.finetune.text_tasks import SentenceTask
from export.models.heads import Head, pooled
from export.reduce.routing import (
    Correctness,
    Diagnosis,
    Judged,
    Policy,
    choose,
    diagnose,
    judge,
    oracle,
    right_at_cost,
    shuffled_at_cost,
    static,
    thresholds,
)
from export.training.runs import read_config, read_metrics

#: The half of the hold-out that thresholds are chosen on.
CHOOSING = "choosing half"
#: Another seed than the hold-out's own, so that its halves are independent of how it was drawn.
_HALVES_SEED = 1
_BATCH, _FOLDS = 64, 5
#: Of the squared weights of standardised features; escalations are rare, so there is little data for many weights.
_PENALTIES = (1.0, 10.0, 100.0, 1000.0)


class CascadeSettings(msgspec.Struct, frozen=True, tag_field="type", tag="cascade"):
    """The lean tier answers first; where its margin is below ``margin``, the full tier answers.

    ``lean`` and ``full`` are the names that ``fewheads export FULL LEAN`` gives to the tiers; a lean run without a
    recorded speed has the name of its directory here. The margin is the likeliest class's probability minus the
    second's.
    """

    lean: str
    full: str
    margin: float


class PolicyReport(msgspec.Struct, frozen=True):
    """A policy on a split, at the threshold of the choosing half, and the accuracy of each control at its mean cost."""

    judged: Judged
    controls: dict[str, float]


class SplitReport(msgspec.Struct, frozen=True):
    """All policies on a split.

    Attributes:
        differing: share of items that the tiers answer differently.
    """

    split: str
    items: int
    lean_accuracy: float
    full_accuracy: float
    differing: float
    policies: tuple[PolicyReport, ...]


class RouteReport(msgspec.Struct, frozen=True):
    """Result of a comparison: the choosing half, then the dev splits; and the cascade, whether recommended or not."""

    task: str
    full: str
    lean: str
    cost_ratio: float
    diagnosis: Diagnosis
    cascade: CascadeSettings
    splits: tuple[SplitReport, ...]


class _Split(NamedTuple):
    """Correctness of the items of a split, whether the tiers differ on them, and the inputs of both routers, [n, …]."""

    name: str
    items: Correctness
    differing: Array
    margins: Array
    features: Array

    def take(self, name: str, rows: Array) -> _Split:
        items = self.items._replace(lean_right=self.items.lean_right[rows], full_right=self.items.full_right[rows])
        return _Split(name, items, *(column[rows] for column in self[2:]))

    def policies(self, router: Router) -> list[Policy]:
        return [Policy("cascade", self.margins, cascade=True), Policy("linear", router.scores(self.features))]

    def report(self, router: Router, chosen: dict[str, Judged]) -> SplitReport:
        items, reports = self.items, []
        for policy in self.policies(router):
            judged = chosen[policy.name]
            cost = judged.mean_cost
            controls = {one.name: right_at_cost(items, one, cost) for one in (static(items), oracle(items))}
            controls["shuffled"] = shuffled_at_cost(items, policy, cost)
            reports.append(PolicyReport(judged, {name: float(right.mean()) for name, right in controls.items()}))
        lean, full, differing = (float(x.mean()) for x in (items.lean_right, items.full_right, self.differing))
        return SplitReport(self.name, len(self.differing), lean, full, differing, tuple(reports))


class Router:
    """Logistic regression on features that are known before any layer runs, for "the full tier is not needed".

    The L2 penalty is that of the least log loss in five-fold cross-validation. Where fewer items than folds are of one
    class, all scores are 0.
    """

    def __init__(self, features: Array, targets: Array) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_score
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self.model = None
        if np.bincount(targets.astype(int), minlength=2).min() < _FOLDS:
            return
        folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
        models = [make_pipeline(StandardScaler(), LogisticRegression(C=1 / penalty)) for penalty in _PENALTIES]
        losses = [cross_val_score(one, features, targets, cv=folds, scoring="neg_log_loss").mean() for one in models]
        self.model = models[int(np.argmax(losses))].fit(features, targets)

    def scores(self, features: Array) -> Array:
        """Return the log odds, [n], for features [n, d]."""
        return np.zeros(len(features)) if self.model is None else np.asarray(self.model.decision_function(features))


def route_run(full: str | Path, lean: str | Path, data_dir: str | Path, cost_ratio: float) -> RouteReport:
    """Fit a router, choose thresholds, and report whether any policy pays.

    Half of the hold-out fits the router, the other half chooses thresholds and decides; dev is only reported, of runs
    that were both measured on it. The router reads the lean tier's embeddings; its own time is not counted. The
    intervals assume that items are independent and that a hold-out is as hard as new data. For SST-2 neither holds
    exactly: its hold-out has phrases, several of a sentence.

    Args:
        full: a run of ``fewheads finetune``.
        lean: a faster run on the same task, of ``fewheads reduce`` or ``fewheads finetune``.
        cost_ratio: the lean tier's time over the full tier's, for every length.

    Raises:
        UsageError: the ratio is not between 0 and 1, or the runs are not classifiers of texts for one task with one
            hold-out.
    """
    if not 0 < cost_ratio < 1:
        fix = "Give the inverse of the speed-up that 'fewheads reduce' measured, for example 0.5 for 2 times faster."
        raise UsageError("cost ratio", given=cost_ratio, expected="lean time / full time, between 0 and 1", fix=fix)
    full, lean = Path(full), Path(lean)
    model, max_length, task = _classifier(lean)
    open_tuned(full, task.name)
    split_of(task.name, {"FULL_RUN": full, "LEAN_RUN": lean})
    tokenizer = load_tokenizer(lean)

    def prepared(split: str, examples: Examples) -> _Split:
        rows = encode(tokenizer, examples, max_length)
        ours, theirs = (read_matching(run, split, examples.targets) for run in (lean, full))
        right, full_right = (np.asarray(one.answers == one.targets, dtype=np.float64) for one in (ours, theirs))
        items = Correctness(right, full_right, cost_ratio)
        features = np.column_stack([pooled_embeddings(model, rows), rows.lengths])
        return _Split(split, items, ours.answers != theirs.answers, margins(ours.logits), features)

    splits = task.examples(data_dir)
    chooses = task.held(splits.holdout, data_dir, 0.5, _HALVES_SEED)
    both = prepared(HOLDOUT, splits.holdout)
    fitting, choosing = both.take("fitting half", ~chooses), both.take(CHOOSING, chooses)
    enough = np.maximum(fitting.items.lean_right, 1 - fitting.items.full_right)  # lean is right, or both are wrong
    router = Router(fitting.features, enough)
    candidates = [(policy, value) for policy in choosing.policies(router) for value in thresholds(policy)]
    chosen = choose(judge(choosing.items, candidates))
    reports = [choosing.report(router, chosen)]
    for split, examples in splits.dev.items():
        if not all(split in read_metrics(run).splits for run in (lean, full)):
            continue
        dev = prepared(split, examples)
        fixed = [(policy, chosen[policy.name].threshold) for policy in dev.policies(router)]
        reports.append(dev.report(router, choose(judge(dev.items, fixed))))
    # The name that 'fewheads export' gives to the lean tier, or else the name of its directory.
    name = reduced_name(read_config(full), read_config(lean)) or lean.name.lower()
    cascade = CascadeSettings(name, FULL, chosen["cascade"].threshold)
    diagnosis = diagnose(list(chosen.values()))
    return RouteReport(task.name, str(full), str(lean), cost_ratio, diagnosis, cascade, tuple(reports))


def pooled_embeddings(model: Head, rows: Rows) -> Array:
    """Return the mean of the embeddings over each row's tokens, [n, d]; the model is not changed."""
    embed = copy.deepcopy(model.transformer)
    embed.layers = nn.ModuleList()
    means = np.empty((len(rows.targets), embed.config.dim), dtype=np.float32)
    with torch.inference_mode():
        for indices in sorted_batches(rows.lengths, _BATCH):
            batch = rows.batch(indices)
            means[indices] = pooled(embed(batch.inputs, batch.mask, batch.segments), batch.mask, "mean").numpy()
    return means


def _classifier(run: Path) -> tuple[Head, int, SentenceTask]:
    found = open_model(run)
    if found.head is not None and found.architecture is not None:
        task = task_of(found, run)
        if isinstance(task, SentenceTask) and task.labels:
            return found.head, found.architecture.max_length, task
    fix = "Give runs of 'fewheads finetune' or 'fewheads reduce' on a task with classes."
    raise UsageError(f"run {run}", given=Raw("no classifier"), expected="a classifier of texts", fix=fix)
