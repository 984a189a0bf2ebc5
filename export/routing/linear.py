"""A router of negligible cost: logistic regression on a few features that are known before any layer runs."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import scipy.optimize
import scipy.special
import torch
from torch import nn

from edge.datatypes import Array
from export.data.tokens import Rows, sorted_batches
from export.models.heads import SequenceClassifier

_BATCH = 64
_FOLDS = 5
#: Of the squared weights of standardised features; escalations are rare, so there is little data for many weights.
_PENALTIES = (1.0, 10.0, 100.0, 1000.0)
#: Of the bias, to keep it finite if there is only one class.
_BIAS_PENALTY = 1e-3


class Linear(msgspec.Struct, frozen=True):
    """A logistic regression: features are standardised by ``mean`` and ``deviation``, [d]; weights [d], a bias."""

    mean: Array
    deviation: Array
    weights: Array
    bias: float

    def scores(self, features: Array) -> Array:
        """Return the log odds of class 1, [n], for features [n, d]."""
        return np.asarray((features - self.mean) / self.deviation @ self.weights + self.bias)


def fit(features: Array, targets: Array) -> Linear:
    """Fit a logistic regression with the L2 penalty of the least log loss in five-fold cross-validation."""
    folds = np.random.default_rng(0).permutation(len(targets)) % _FOLDS

    def loss(penalty: float) -> float:
        losses = []
        for fold in range(_FOLDS):
            kept = folds != fold
            scores = _fit(features[kept], targets[kept], penalty).scores(features[~kept])
            losses.append(_log_loss(scores, targets[~kept]))
        return float(np.sum(losses))

    return _fit(features, targets, min(_PENALTIES, key=loss))


def pooled_embeddings(model: SequenceClassifier, rows: Rows) -> Array:
    """Return the mean of the embeddings over each row's tokens, [n, d]; the model is not changed."""
    embed = copy.deepcopy(model)
    embed.transformer.layers = nn.ModuleList()
    embed.pooling, embed.classifier = "mean", nn.Identity()  # type: ignore[assignment]
    pooled = np.empty((len(rows.targets), model.transformer.config.dim), dtype=np.float32)
    with torch.inference_mode():
        for indices in sorted_batches(rows.lengths, _BATCH):
            batch = rows.batch(indices)
            pooled[indices] = embed(batch.inputs, batch.mask, batch.segments).numpy()
    return pooled


def _fit(features: Array, targets: Array, penalty: float) -> Linear:
    mean, deviation = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    deviation = np.where(deviation > 0, deviation, 1.0)  # a constant feature becomes 0
    # torch multiplies, because it keeps to one thread; NumPy would use every core.
    x = torch.from_numpy(np.column_stack([(features - mean) / deviation, np.ones(len(features))]))
    penalties = np.append(np.full(features.shape[1], penalty), _BIAS_PENALTY)

    def objective(weights: Array) -> tuple[float, Array]:
        scores = (x @ torch.from_numpy(weights)).numpy()
        value = _log_loss(scores, targets) + 0.5 * float(penalties @ weights**2)
        slopes = torch.from_numpy(scipy.special.expit(scores) - targets)
        return value, (x.T @ slopes).numpy() + penalties * weights

    weights = scipy.optimize.minimize(objective, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x
    return Linear(mean, deviation, weights[:-1], float(weights[-1]))


def _log_loss(scores: Array, targets: Array) -> float:
    return float((np.logaddexp(0, scores) - targets * scores).sum())
