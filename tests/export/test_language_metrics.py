import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.generate.metrics import answer_measures, token_measures
from export.generate.objective import TeacherForced

TOKENS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=3, max_size=30)


def forced(pairs, losses=None):
    """Return predictions of (predicted, right) tokens, three examples, the last of which has the rest."""
    predicted, targets = np.array(pairs).T
    rows = np.minimum(np.arange(len(pairs)), 2)
    return TeacherForced(rows, np.ones(len(pairs)) if losses is None else np.array(losses), predicted, targets)


def by_name(measures):
    return {measure.metric: measure for measure in measures}


@settings(deadline=None)  # the first call imports scikit-learn
@given(TOKENS)
def test_precision_recall_and_f1_are_scikit_learns(pairs):
    metrics = pytest.importorskip("sklearn.metrics")
    found = by_name(token_measures("test", forced(pairs)))
    predicted, targets = np.array(pairs).T
    expected = metrics.precision_recall_fscore_support(targets, predicted, average="macro", zero_division=0)[:3]
    for name, value in zip(("precision", "recall", "f1"), expected, strict=True):
        measure = found[f"token_{name}"]
        assert measure.value == pytest.approx(value)
        assert measure.interval is None or 0 <= measure.interval[0] < measure.interval[1] <= 1


def test_intervals_contain_scores_in_spite_of_rare_tokens():
    generator = np.random.default_rng(0)
    targets = np.concatenate([generator.integers(0, 2, 600), np.arange(2, 102)])  # most tokens occur once, wrongly
    predicted = np.where(targets < 2, targets, 0)
    rows = generator.permutation(np.arange(700) // 7)
    order = np.argsort(rows, kind="stable")
    found = by_name(token_measures("test", TeacherForced(rows[order], np.ones(700), predicted[order], targets[order])))
    low, high = found["token_f1"].interval
    assert low <= found["token_f1"].value <= high


def test_cross_entropy_is_per_token_and_perplexity_its_exponential():
    found = by_name(token_measures("test", forced([(1, 1)] * 4, [1.0, 2.0, 3.0, 6.0])))
    ce, perplexity = found["cross_entropy"], found["perplexity"]
    assert (ce.value, ce.n) == (3.0, 3)
    assert perplexity.value == pytest.approx(math.e**3)
    assert perplexity.interval == pytest.approx(tuple(math.exp(bound) for bound in ce.interval))
    assert ce.interval == (1.0, 4.5)  # resamples of the first example alone, and of the third, whose mean is 4.5


def test_answers_are_compared_as_numbers_and_unparsable_ones_are_counted_apart():
    right = ["4", "1/2", "-3", "True", "100"]
    found = by_name(answer_measures("test", ["4.0", "3.5", None, "True", "a, b"], right))
    assert {name: (measure.value, measure.n) for name, measure in found.items()} == {
        "exact_match": (0.4, 5),
        "unparsable": (0.5, 4),
        "mse": (4.5, 2),
        "rmse": (4.5**0.5, 2),
    }
    assert found["rmse"].interval == pytest.approx((0, 3))
    assert found["exact_match"].interval == pytest.approx((0.1176, 0.7693), abs=1e-4)  # Wilson's


def test_errors_are_absent_where_nothing_is_a_number():
    assert set(by_name(answer_measures("test", ["True"], ["False"]))) == {"exact_match"}
    assert set(by_name(answer_measures("test", [None], ["1"]))) == {"exact_match", "unparsable"}
