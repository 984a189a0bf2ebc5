import numpy as np
import pytest
import scipy.stats

from export.finetune.predictions import METRICS, accuracy, f1, matthews, measures, pearson, spearman
from export.training.intervals import interval

# tp 3, fp 1, fn 2, tn 4.
PREDICTED = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
TARGETS = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])


def test_classes_by_hand():
    assert accuracy(PREDICTED, TARGETS) == pytest.approx(7 / 10)
    assert f1(PREDICTED, TARGETS) == pytest.approx(2 * 3 / (2 * 3 + 1 + 2))
    # (tp tn - fp fn) / sqrt((tp + fp)(tp + fn)(tn + fp)(tn + fn))
    assert matthews(PREDICTED, TARGETS) == pytest.approx((3 * 4 - 1 * 2) / np.sqrt(4 * 5 * 5 * 6))


def test_macro_f1_is_scikit_learns_for_each_row():
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, targets = np.random.default_rng(2).integers(0, 6, (2, 4, 12))
    predictions[0][predictions[0] == 3] = 4  # a class that some rows have in the targets only, or not at all
    each = [sklearn.f1_score(*pair, average="macro") for pair in zip(targets, predictions, strict=True)]
    assert METRICS["macro_f1"](predictions, targets) == pytest.approx(each)


def test_correlations_are_scipys():
    random = np.random.default_rng(0)
    targets = random.integers(0, 6, 80).astype(np.float32)  # with ties
    predictions = (targets + random.normal(size=80)).astype(np.float32)
    assert pearson(predictions, targets) == pytest.approx(scipy.stats.pearsonr(predictions, targets)[0], rel=1e-6)
    assert spearman(predictions, targets) == pytest.approx(scipy.stats.spearmanr(predictions, targets)[0], rel=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_undefined_metrics_are_zero_and_those_of_many_rows_are_those_of_each(name):
    assert METRICS[name](np.full(7, 0.1), np.arange(7) % 2 * 2) == 0
    predictions, targets = np.random.default_rng(1).integers(0, 2, (2, 5, 30))
    each = [float(METRICS[name](*pair)) for pair in zip(predictions, targets, strict=True)]
    assert METRICS[name](predictions, targets) == pytest.approx(each)


def test_interval_of_accuracy_is_the_binomials():
    correct = np.arange(1000) < 800
    low, high = interval(accuracy, correct, np.ones(1000, dtype=bool))
    assert (low, high) == pytest.approx(tuple(scipy.stats.binom(1000, 0.8).ppf([0.025, 0.975]) / 1000), abs=0.004)
    (one,) = measures(("accuracy",), "dev", correct, np.ones(1000, dtype=bool))
    assert (one.metric, one.split, one.n, one.value) == ("accuracy", "dev", 1000, 0.8)
    assert one.interval == pytest.approx((low, high), abs=0.003)


def test_24_right_answers_are_no_proof_that_all_are_right():
    """Each resample of them is right, too, so the bootstrap would give 1 … 1."""
    targets = np.arange(24) % 2
    found = measures(("accuracy", "macro_f1", "matthews"), "dev", targets, targets)
    assert [one.value for one in found] == [1, 1, 1]
    assert [one.interval for one in found] == [(pytest.approx(24 / (24 + 1.96**2), rel=1e-4), 1), None, None]
