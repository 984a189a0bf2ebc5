import numpy as np
import pytest

from edge.bundles import expression
from export.errors import DataError
from export.papers.calculator import data
from export.papers.calculator.benchmark import evaluate


def test_splits_have_the_documented_sizes_starts_and_ranges(splits):
    assert {name: len(split.expressions) for name, split in splits.items()} == data.SIZES
    assert (splits["long"].expressions[0], splits["out_of_range"].expressions[0]) == ("-5 + 1", "-8 + -8 + -8")
    assert -15 <= splits["train"].truth.min() <= splits["train"].truth.max() <= 14
    means = [np.abs(splits[name].truth).mean() for name in ("in_range", "out_of_range")]
    assert means == pytest.approx([4.02, 9.75], abs=0.01)
    assert (np.diff(splits["long"].terms) >= 0).all()
    assert not splits["train"].has_unseen_operand.any()


def test_tokens_and_truth_match_the_expressions(splits):
    for split in splits.values():
        assert split.tokens.shape == (len(split.expressions), 15)
        assert split.tokens.dtype == split.truth.dtype == np.float32
        assert split.truth.tolist() == [expression.evaluate(text) for text in split.expressions]


def test_the_three_term_splits_share_nothing_and_cover_all(splits):
    parts = [set(splits[name].expressions) for name in ("train", "val", "in_range")]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 10**3 * 4
    assert sum(text in parts[0] | parts[1] for text in splits["long"].expressions) == 49


def test_another_generator_is_rejected(monkeypatch):
    monkeypatch.setitem(data.SIZES, "long", 701)
    with pytest.raises(DataError, match=r"splits: got .*'long': 700.* expected .*'long': 701"):
        data.load.__wrapped__()


def constant(splits, value):
    """Return the measures of a predictor of one value, by metric and split."""
    measures = evaluate(lambda tokens: np.full((len(tokens), 1), value, np.float32), splits)
    return {(measure.metric, measure.split): measure for measure in measures}


def test_errors_of_a_constant_are_those_by_hand(splits):
    zero, truth = constant(splits, 0.0), splits["in_range"].truth
    maes = [zero["mae", split].value for split in ("in_range", "out_of_range", "long")]
    assert maes == pytest.approx([4.02, 9.75, 5.76], abs=0.01)
    assert zero["exact_match", "in_range"].value == pytest.approx((truth == 0).mean())
    relative = [abs(2.0 - y) / (abs(y) or 1.0) for y in truth.tolist()]  # zeros count as 1
    assert constant(splits, 2.0)["mre", "in_range"].value == pytest.approx(np.mean(relative))


def test_long_is_split_by_terms_and_by_the_unseen_operand(splits):
    found = constant(splits, 0.0)
    sizes = {split: measure.n for (metric, split), measure in found.items() if metric == "mae"}
    assert [sizes[f"long/{terms}"] for terms in range(2, 9)] == [100] * 7
    assert (sizes["long/4-8"], sizes["long/with_5"], sizes["long/without_5"]) == (500, 264, 436)
    by_terms = [found["mae", f"long/{terms}"].value for terms in range(4, 9)]
    assert found["mae", "long/4-8"].value == pytest.approx(np.mean(by_terms))


def test_intervals_are_those_of_the_mean_and_repeat(splits):
    found = constant(splits, 0.0)
    assert found == constant(splits, 0.0)
    low, high = found["mae", "out_of_range"].interval
    errors = np.abs(splits["out_of_range"].truth)
    assert (high - low) / 2 == pytest.approx(1.96 * errors.std() / np.sqrt(len(errors)), rel=0.1)
    # Of five lengths that are drawn apart, each 100 items: the mean has a fifth of the sum of variances.
    low, high = found["mae", "long/4-8"].interval
    long = splits["long"]
    variance = sum(np.abs(long.truth[long.terms == terms]).var() / 100 for terms in range(4, 9)) / 25
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(variance), rel=0.1)
