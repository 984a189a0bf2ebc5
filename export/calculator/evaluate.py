"""Evaluation: errors on every split with their intervals, and the scores of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.papers.calculator.benchmark import NEW_LENGTHS, measures_of
from export.papers.calculator.data import LONG_TERMS, Split
from export.papers.calculator.networks import Transformer
from export.training.intervals import mean, mean_measure, middle, resampled, wilson

EVALUATED = ("val", "in_range", "out_of_range", "long")


def evaluate(predict: Callable[[Array], Array], splits: Mapping[str, Split]) -> tuple[Measure, ...]:
    """Measure a predictor on every split but ``train``.

    Metrics: ``mae`` is mean |e| and ``mre`` mean |e| / |y|, zeros of y taken as 1, as in paper 000, both with bootstrap
    intervals; ``exact_match`` is the share of answers that are right once rounded, with Wilson's interval. Beside each
    split as a whole there are ``long/2`` … ``long/8`` by number of terms, ``long/4-8``, the mean over those lengths,
    which are new to the predictor, and ``long/with_5`` and ``long/without_5`` by whether the unseen operand 5 occurs.
    ``benchmark`` has the scores of :mod:`export.papers.calculator.benchmark`.

    Args:
        predict: maps tokens [n, 15] to values [n, 1].
    """
    return measured({name: predict(splits[name].tokens)[:, 0] for name in EVALUATED}, splits)


def measured(values: Mapping[str, Array], splits: Mapping[str, Split]) -> tuple[Measure, ...]:
    """Return the measures of :func:`evaluate` of predicted values [n], by split."""
    measures: list[Measure] = []
    for name in EVALUATED:
        split, predicted = splits[name], values[name]
        errors = np.abs(predicted.astype(np.float64) - split.truth)
        size = np.abs(np.where(split.truth == 0, 1, split.truth))
        measures += [
            _mean("mae", name, [errors]),
            _mean("mre", name, [errors / size]),
            mean_measure("exact_match", name, np.rint(predicted) == split.truth),
        ]
        if name == "long":
            measures += _long(split, errors)
    return (*measures, *measures_of(values, splits))


def head_use(model: Transformer, splits: Mapping[str, Split]) -> tuple[Measure, ...]:
    """Measure the use of heads by an adaptive network: mean scores, and the share of coordinates in use."""
    model.eval()
    measures: list[Measure] = []
    for name in EVALUATED:
        tokens = torch.from_numpy(splits[name].tokens)
        with torch.no_grad():
            scores = model.scored(tokens)[1]
            use = {"head_score": torch.stack(scores), "kept_coordinates": model.kept(scores)}
        measures += [
            Measure(metric=metric, split=name, value=float(values.mean()), n=len(tokens))
            for metric, values in use.items()
        ]
    return tuple(measures)


def _long(split: Split, errors: Array) -> list[Measure]:
    by_terms = {terms: errors[split.terms == terms] for terms in LONG_TERMS}
    unseen = split.has_unseen_operand
    parts = {
        **{f"long/{terms}": [part] for terms, part in by_terms.items()},
        "long/4-8": [by_terms[terms] for terms in NEW_LENGTHS],
        "long/with_5": [errors[unseen]],
        "long/without_5": [errors[~unseen]],
    }
    return [_mean("mae", name, strata) for name, strata in parts.items()]


def _mean(metric: str, split: str, strata: list[Array]) -> Measure:
    """Return the mean of the strata's mean errors, with the interval from resampling each of them."""
    generator = np.random.default_rng(0)
    means = np.mean([resampled(mean, errors, generator=generator) for errors in strata], axis=0)
    value = float(np.mean([errors.mean() for errors in strata]))
    return Measure(metric=metric, split=split, value=value, n=sum(map(len, strata)), interval=middle(means))


def with_items(measure: Measure) -> Measure:
    """Return a mean share over seeds whose interval is at least Wilson's over the items.

    Seeds that are right everywhere do not differ, and the items are no more for it.
    """
    low, high = wilson(round(measure.value * measure.n), measure.n)
    seeds_low, seeds_high = measure.interval or (low, high)
    bounds = max(min(low, seeds_low), 0.0), min(max(high, seeds_high), 1.0)
    return msgspec.structs.replace(measure, interval=bounds)
