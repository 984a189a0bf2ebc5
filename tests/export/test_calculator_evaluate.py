import numpy as np
import pytest

from export.calculator.evaluate import PAPER, evaluate, head_use, paper_long_error
from export.calculator.models import Transformer4


def value_of(measures, metric, split):
    return next(measure.value for measure in measures if (measure.metric, measure.split) == (metric, split))


def test_a_perfect_predictor(splits):
    known = {split.tokens.tobytes(): split.truth[:, None] for split in splits.values()}
    measures = evaluate(lambda tokens: known[tokens.tobytes()], splits)
    for measure in measures:
        assert measure.value == (1.0 if measure.metric == "exact_match" else 0.0)
        assert measure.interval in (None, (0.0, 0.0))


def test_predicting_zero(splits):
    measures = evaluate(lambda tokens: np.zeros((len(tokens), 1), np.float32), splits)
    assert value_of(measures, "mae", "in_range") == pytest.approx(4.02, abs=0.01)
    assert value_of(measures, "mae", "out_of_range") == pytest.approx(9.75, abs=0.01)
    assert value_of(measures, "mae", "long") == pytest.approx(5.76, abs=0.01)
    truth = splits["in_range"].truth
    assert value_of(measures, "mre", "in_range") == pytest.approx((truth != 0).mean())
    assert value_of(measures, "exact_match", "in_range") == pytest.approx((truth == 0).mean())


def test_zeros_are_divided_by_one(splits):
    truth = splits["in_range"].truth
    measures = evaluate(lambda tokens: np.full((len(tokens), 1), 2.0, np.float32), splits)
    relative = [abs(2.0 - y) / (abs(y) or 1.0) for y in truth.tolist()]
    assert value_of(measures, "mre", "in_range") == pytest.approx(np.mean(relative))


def test_long_is_split_by_terms_and_by_the_unseen_operand(splits):
    measures = evaluate(lambda tokens: np.zeros((len(tokens), 1), np.float32), splits)
    sizes = {measure.split: measure.n for measure in measures if measure.metric == "mae"}
    assert [sizes[f"long/{terms}"] for terms in range(2, 9)] == [100] * 7
    assert sizes["long/4-8"] == 500
    assert sizes["long/with_5"] == 264
    assert sizes["long/without_5"] == 436
    by_terms = [value_of(measures, "mae", f"long/{terms}") for terms in range(4, 9)]
    assert value_of(measures, "mae", "long/4-8") == pytest.approx(np.mean(by_terms))


def test_intervals_hold_the_value_and_repeat(splits):
    def measures():
        return evaluate(lambda tokens: np.zeros((len(tokens), 1), np.float32), splits)

    for measure in measures():
        if measure.interval:
            assert measure.interval[0] < measure.value < measure.interval[1]
    assert measures() == measures()


def test_interval_is_that_of_the_mean(splits):
    measures = evaluate(lambda tokens: np.zeros((len(tokens), 1), np.float32), splits)
    mae = next(measure for measure in measures if (measure.metric, measure.split) == ("mae", "out_of_range"))
    errors = np.abs(splits["out_of_range"].truth)
    half_width = 1.96 * errors.std() / np.sqrt(len(errors))
    assert (mae.interval[1] - mae.interval[0]) / 2 == pytest.approx(half_width, rel=0.1)


def test_the_papers_figure_for_long_expressions_is_no_error(splits):
    assert paper_long_error(splits["long"], splits["in_range"]) == pytest.approx(6.166, abs=5e-4)
    for figures in PAPER.values():
        assert figures["mae", "long"] == pytest.approx(6.166, abs=0.15)


def test_head_use_of_a_fresh_network(splits):
    model = Transformer4("fixed")
    measures = head_use(model, splits)
    assert value_of(measures, "kept_coordinates", "val") == 1.0
    assert 0.7 < value_of(measures, "head_score", "long") < 1.0
