import numpy as np
import pytest

from export.calculator.evaluate import PAPER, evaluate, head_use
from export.calculator.models import Transformer4


def constant(splits, value):
    """Return the measures of a predictor of one value, by metric and split."""
    measures = evaluate(lambda tokens: np.full((len(tokens), 1), value, np.float32), splits)
    return {(measure.metric, measure.split): measure for measure in measures}


def test_a_perfect_predictor(splits):
    known = {split.tokens.tobytes(): split.truth[:, None] for split in splits.values()}
    for measure in evaluate(lambda tokens: known[tokens.tobytes()], splits):
        assert measure.value == (1.0 if measure.metric == "exact_match" else 0.0)
        assert measure.interval in (None, (0.0, 0.0))


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
    for name in ("out_of_range", "long/4-8"):
        low, high = found["mae", name].interval
        assert low < found["mae", name].value < high
    low, high = found["mae", "out_of_range"].interval
    errors = np.abs(splits["out_of_range"].truth)
    assert (high - low) / 2 == pytest.approx(1.96 * errors.std() / np.sqrt(len(errors)), rel=0.1)
    # Of five lengths that are drawn apart, each 100 items: the mean has a fifth of the sum of variances.
    low, high = found["mae", "long/4-8"].interval
    long = splits["long"]
    variance = sum(np.abs(long.truth[long.terms == terms]).var() / 100 for terms in range(4, 9)) / 25
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(variance), rel=0.1)


def test_the_papers_figure_for_long_expressions_is_not_an_error(splits):
    slip = np.abs(splits["long"].truth).mean() - splits["in_range"].truth.mean()
    assert slip == pytest.approx(6.166, abs=5e-4)
    for figures in PAPER.values():
        assert figures["mae", "long"] == pytest.approx(6.166, abs=0.15)


def test_head_use_of_a_new_network(splits):
    found = {(measure.metric, measure.split): measure.value for measure in head_use(Transformer4("fixed"), splits)}
    assert found["kept_coordinates", "val"] == 1.0
    assert 0.7 < found["head_score", "long"] < 1.0
