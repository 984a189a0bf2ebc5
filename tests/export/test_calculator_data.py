import numpy as np
import pytest

from edge.bundles.expression import evaluate
from export.calculator import data
from export.errors import DataError


def test_splits_have_the_documented_sizes_starts_and_ranges(splits):
    assert {name: len(split.expressions) for name, split in splits.items()} == data.SIZES
    assert splits["long"].expressions[0] == "-5 + 1"
    assert splits["out_of_range"].expressions[0] == "-8 + -8 + -8"
    assert -15 <= splits["train"].truth.min() <= splits["train"].truth.max() <= 14
    means = [np.abs(splits[name].truth).mean() for name in ("in_range", "out_of_range")]
    assert means == pytest.approx([4.02, 9.75], abs=0.01)


def test_tokens_and_truth_match_the_expressions(splits):
    for split in splits.values():
        assert split.tokens.shape == (len(split.expressions), 15)
        assert split.tokens.dtype == split.truth.dtype == np.float32
        assert split.truth.tolist() == [evaluate(text) for text in split.expressions]


def test_the_three_term_splits_share_nothing_and_cover_all(splits):
    parts = [set(splits[name].expressions) for name in ("train", "val", "in_range")]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 10**3 * 4
    assert sum(text in parts[0] | parts[1] for text in splits["long"].expressions) == 49


def test_terms_and_unseen_operands_of_long(splits):
    long = splits["long"]
    assert np.bincount(long.terms).tolist() == [0, 0, 100, 100, 100, 100, 100, 100, 100]
    assert (np.diff(long.terms) >= 0).all()
    assert long.has_unseen_operand.mean() == pytest.approx(0.377, abs=5e-4)
    assert not splits["train"].has_unseen_operand.any()


def test_another_generator_is_rejected(monkeypatch):
    monkeypatch.setitem(data.SIZES, "long", 701)
    with pytest.raises(DataError, match=r"splits: got .*'long': 700.* expected .*'long': 701"):
        data.load.__wrapped__()
