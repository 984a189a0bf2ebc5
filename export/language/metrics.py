"""Metrics of language models, with intervals over examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.generate.answers import parse_number, same_answer
from export.generate.objective import TeacherForced
from export.training.intervals import item_shares, known_interval, known_middle, mean, mean_measure


def token_measures(split: str, forced: TeacherForced) -> tuple[Measure, ...]:
    """Return cross-entropy (nats per token) and perplexity, and precision, recall and F1 of the most likely tokens.

    The last three are averages over all tokens of the vocabulary that occur among the targets or the predictions, each
    token with the same weight; a token that is never predicted has precision 0.
    """
    examples = int(forced.rows[-1]) + 1
    sums, counts = (np.bincount(forced.rows, weights) for weights in (forced.losses, None))
    value = float(forced.losses.mean())
    bounds = known_interval(_ratio_of_sums, sums, counts)
    of_perplexity = (float(np.exp(bounds[0])), float(np.exp(bounds[1]))) if bounds else None
    losses = (
        Measure("cross_entropy", split, value, examples, interval=bounds),
        Measure("perplexity", split, float(np.exp(value)), examples, interval=of_perplexity),
    )
    shares = item_shares(examples)
    tables = [table.astype(np.float64) for table in _token_counts(forced, examples)]
    whole = _scores(*(table.mean(axis=0) for table in tables))
    # Without rare tokens, which are predicted worst, resamples would be better than the whole: a token that does not
    # occur in one keeps its score.
    hits, predicted, right = (shares @ table for table in tables)
    resampled = _scores(hits, predicted, right, whole)
    return losses + tuple(
        Measure(f"token_{name}", split, float(of_tokens.mean()), examples, interval=known_middle(mean(resampled[name])))
        for name, of_tokens in whole.items()
    )


def answer_measures(split: str, found: Sequence[str | None], right: Sequence[str]) -> tuple[Measure, ...]:
    """Return the exact match of answers, and for those that should be numbers the errors and the unparsable rate.

    ``mse`` and ``rmse`` are over the answers that are numbers; ``unparsable`` is the share of those that are not.

    Args:
        found: by :func:`export.generate.answers.parse_answer`.
    """
    pairs = list(zip(found, right, strict=True))
    measures = [mean_measure("exact_match", split, np.array([same_answer(*pair) for pair in pairs]))]
    numbers = [(parse_number(one), wanted) for one, other in pairs if (wanted := parse_number(other)) is not None]
    if numbers:
        measures.append(mean_measure("unparsable", split, np.array([one is None for one, _ in numbers])))
    squares = np.array([float(one - wanted) ** 2 for one, wanted in numbers if one is not None])
    if squares.size:
        for metric, of in (("mse", mean), ("rmse", _root_mean)):
            value, bounds = float(of(squares)), known_interval(of, squares)
            measures.append(Measure(metric, split, value, len(squares), interval=bounds))
    return tuple(measures)


def _ratio_of_sums(numerators: Array, denominators: Array) -> Array:
    return np.asarray(numerators.sum(axis=-1) / denominators.sum(axis=-1))


def _root_mean(squares: Array) -> Array:
    return np.sqrt(mean(squares))


def _token_counts(forced: TeacherForced, examples: int) -> tuple[Array, Array, Array]:
    """Return how often each token that occurs is predicted rightly, predicted, and right, [examples, tokens] each."""
    tokens, places = np.unique(np.concatenate([forced.predicted, forced.targets]), return_inverse=True)
    predicted, targets = np.split(places, 2)
    hit = predicted == targets
    counts = np.zeros((3, examples, len(tokens)), dtype=np.int32)
    np.add.at(counts[0], (forced.rows[hit], targets[hit]), 1)
    np.add.at(counts[1], (forced.rows, predicted), 1)
    np.add.at(counts[2], (forced.rows, targets), 1)
    return counts[0], counts[1], counts[2]


def _scores(hits: Array, predicted: Array, right: Array, absent: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return the scores of each token, the last axis; those of tokens that do not occur are ``absent``."""
    occurs = predicted + right > 0

    def scores(name: str, denominators: Array, factor: int = 1) -> Array:
        found = np.divide(factor * hits, denominators, out=np.zeros_like(hits), where=denominators > 0)
        return found if absent is None else np.where(occurs, found, absent[name])

    return {
        "precision": scores("precision", predicted),
        "recall": scores("recall", right),
        "f1": scores("f1", predicted + right, 2),
    }
