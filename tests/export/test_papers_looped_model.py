"""Looped transformers: function classes, baselines, the model and its training objective."""

from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import KNeighborsRegressor

from export.papers.looped.baselines import (
    BASELINES,
    Pairs,
    averaging,
    boosted_trees,
    gradient_descent,
    greedy_tree,
    lasso,
    least_squares,
    nearest,
    on_signs,
    predict_after,
    two_layer_network,
)
from export.papers.looped.model import Embed, PromptConfig, PromptTransformer, StepGraph, gpt2_shapes, trajectory
from export.papers.looped.options import LoopedOptions
from export.papers.looped.prompts import (
    EVALUATION,
    FUNCTION_CLASSES,
    GOLDEN,
    SPARSITY,
    TREE_DEPTH,
    TUNING,
    VALIDATION,
    draw_prompts,
    generator_of,
    training_generator,
)
from export.papers.looped.recipes import Curriculum, Rising, Stage, training_plan
from export.papers.looped.solvers import anderson
from export.papers.looped.train import PromptObjective
from export.training.recipe import Recipe

CONFIG = PromptConfig(dims=3, points=6, dim=16, shapes=gpt2_shapes(16, 2, 1))


def prompts(name, number=64, points=40, dims=20, **options):
    return draw_prompts(name, number, points, dims, torch.Generator().manual_seed(0), **options)


def objective(model, curriculum, *, seed=0, steps=7, rows=4, **options):
    recipe = Recipe(epochs=2, peak_learning_rate=1e-3, batch_size=rows)
    stage = Stage("one", recipe, curriculum, curriculum.loops.end, steps)
    return PromptObjective(model, "linear", stage, seed=seed, **options)


def weights_of(xs, ys):
    return torch.linalg.lstsq(xs, ys[..., None]).solution[..., 0]


@pytest.mark.parametrize("name", FUNCTION_CLASSES)
def test_values_have_the_variance_of_the_normaliser(name):
    xs, ys = prompts(name, number=4000)
    assert xs.shape == (4000, 40, 20)
    assert ys.shape == (4000, 40)
    assert float(ys.square().mean()) == pytest.approx(FUNCTION_CLASSES[name].normaliser(20), rel=0.1)
    assert float(xs.var()) == pytest.approx(1, rel=0.02)
    assert torch.equal(prompts(name).ys, prompts(name).ys)


def test_every_purpose_and_every_stage_of_a_training_draws_prompts_of_its_own():
    purposes = (EVALUATION, VALIDATION, GOLDEN, TUNING)
    generators = [generator_of(seed) for seed in purposes]
    generators += [training_generator(*one) for one in product((0, 1, 2**32), (0, 1), (0, 1, 1000))]
    first = {float(draw_prompts("linear", 1, 2, 3, generator).ys[0, 0]) for generator in generators}
    assert len(first) == len(generators)


def test_weights_are_normal_and_sparse_ones_among_the_active_coordinates():
    assert float(weights_of(*prompts("linear")).var()) == pytest.approx(1, rel=0.1)
    found = weights_of(*prompts("sparse")).abs() > 1e-3
    assert (found.sum(dim=1) == SPARSITY).all()
    assert found.any(dim=0).sum() > 15  # not always the same ones
    xs, ys = prompts("sparse", number=200, points=10, active_dims=5)
    assert (xs[..., 5:] == 0).all()
    assert (xs[..., :5] != 0).all()
    counts = (weights_of(xs[..., :5], ys).abs() > 1e-3).sum(dim=1)
    assert counts.max() == SPARSITY
    assert counts.float().mean() > 0.98 * SPARSITY  # few weights are close to zero


def test_a_tree_compares_coordinates_with_zero_on_each_level():
    xs, ys = prompts("tree", number=8, points=500, dims=5)
    for x, y in zip(xs, ys, strict=True):
        signs = (x > 0).int().tolist()
        by_signs = {}
        for sign, value in zip(map(tuple, signs), y.tolist(), strict=True):
            assert by_signs.setdefault(sign, value) == value  # only the signs decide
        assert 2 <= len(set(y.tolist())) <= 2**TREE_DEPTH


def test_a_network_is_positively_homogeneous():
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(4, 10, 6, generator=generator)
    draw = FUNCTION_CLASSES["relu"].draw
    values = [draw(scale * xs, torch.Generator().manual_seed(1)) for scale in (1.0, 2.5, -1.0)]
    torch.testing.assert_close(values[1], 2.5 * values[0])
    assert not torch.allclose(values[2], -values[0])  # as a linear function would be


def drawn(name, pairs, dims, number=50, seed=0):
    """Pairs of prompts, and the values of their last points."""
    xs, ys = (x.double() for x in draw_prompts(name, number, pairs + 1, dims, torch.Generator().manual_seed(seed)))
    return Pairs(xs[:, :-1], ys[:, :-1], xs[:, -1]), ys[:, -1]


def error(predict, *prompts):
    pairs, values = drawn(*prompts)
    return float((predict(pairs) - values).square().mean())


def fitted(model, pairs):
    arrays = (tensor.numpy() for tensor in pairs)
    return [model.fit(xs, ys).predict(x[None])[0] for xs, ys, x in zip(*arrays, strict=True)]


def test_least_squares_is_exact_with_as_many_pairs_as_dimensions_and_of_least_norm_with_fewer():
    assert error(least_squares, "linear", 20, 20) < 1e-6
    pairs, _ = drawn("linear", 8, 20)
    np.testing.assert_allclose(least_squares(pairs), fitted(LinearRegression(fit_intercept=False), pairs), atol=1e-9)


@pytest.mark.parametrize("pairs", [2, 12])
def test_the_nearest_points_are_those_of_scikit_learn(pairs):
    prompts, _ = drawn("relu", pairs, 4)
    np.testing.assert_allclose(nearest(prompts), fitted(KNeighborsRegressor(min(3, pairs)), prompts))


def test_averaging_and_descent_begin_alike_and_descent_goes_on_to_least_squares():
    pairs, _ = drawn("linear", 40, 5)
    torch.testing.assert_close(gradient_descent(pairs, steps=1, rate=0.01), 0.02 * averaging(pairs))
    torch.testing.assert_close(gradient_descent(pairs, steps=2000), least_squares(pairs))
    few, _ = drawn("linear", 1, 5)
    torch.testing.assert_close(gradient_descent(few, steps=50), least_squares(few), atol=0.1, rtol=0)  # no divergence


def test_lasso_finds_the_coordinates_of_a_sparse_vector_that_least_squares_cannot():
    assert error(lambda pairs: lasso(pairs, 0.01), "sparse", 15, 20) < 0.05
    assert error(least_squares, "sparse", 15, 20) > 0.3


@pytest.mark.parametrize("predict", [lambda pairs: greedy_tree(pairs, depth=4), boosted_trees])
def test_trees_on_signs_learn_a_step_with_one_split(predict):
    pairs, _ = drawn("linear", 30, 3)
    step = pairs._replace(ys=(pairs.xs[..., 1] > 0).double())
    assert float((on_signs(predict)(step) - (pairs.points[:, 1] > 0).double()).abs().max()) < 0.05


def test_a_network_learns_a_network():
    learned = error(lambda pairs: two_layer_network(pairs, steps=300), "relu", 40, 2)
    assert learned < 0.1 * error(averaging, "relu", 40, 2)


def test_a_prediction_uses_the_pairs_before_its_point_alone():
    xs, ys = draw_prompts("linear", 20, 6, 3, torch.Generator().manual_seed(0))
    found = predict_after(BASELINES["linear"]["least squares"].predict, xs, ys[:, :-1], range(6))
    assert (found[:, 0] == 0).all()
    np.testing.assert_allclose(found[:, 3:], ys[:, 3:], atol=1e-3)
    assert np.abs(found[:, 1] - ys[:, 1].numpy()).mean() > 0.1


def make_model(**options):
    torch.manual_seed(0)
    return PromptTransformer(msgspec.structs.replace(CONFIG, **options)).eval()


def make_prompts(number=4, points=6, seed=0):
    return draw_prompts("linear", number, points, 3, torch.Generator().manual_seed(seed))


def test_parameter_counts_are_those_of_the_papers():
    assert PromptTransformer(training_plan("linear", LoopedOptions()).config).parameter_count == 50_561
    paper = PromptTransformer(training_plan("linear", LoopedOptions("paper")).config).parameter_count
    unlooped = PromptTransformer(training_plan("linear", LoopedOptions("paper", unlooped=True)).config).parameter_count
    assert (paper, unlooped) == (795_905, 9_483_265)  # 0.79 and 9.48 million
    assert unlooped / paper == pytest.approx(12, rel=0.01)


def test_a_prediction_depends_on_earlier_pairs_only():
    model, (xs, ys) = make_model(), make_prompts()
    expected = model(xs, ys, loops=3)[-1]
    changed = ys.clone()
    changed[:, 3:] += 10
    found = model(xs, changed, loops=3)[-1]
    torch.testing.assert_close(found[:, :4], expected[:, :4])
    assert not torch.allclose(found[:, 4], expected[:, 4])
    torch.testing.assert_close(model(xs, ys[:, :-1], loops=3)[-1], expected)  # the last value is not needed
    torch.testing.assert_close(model(xs[:, :4], ys[:, :3], loops=3)[-1], expected[:, :4])


def test_a_training_resumes_no_other_injection_though_the_weights_are_equal():
    models, (xs, ys) = [make_model(injection=one) for one in ("add", "none")], make_prompts()
    assert not torch.allclose(*(model(xs, ys, loops=3)[-1] for model in models))
    curriculum = Curriculum(Rising(3, 3), Rising(6, 6), Rising(4, 4))
    first, other, again = (objective(one, curriculum).fingerprint() for one in (*models, models[0]))
    assert first == again != other


@pytest.mark.parametrize("injection", ["add", "multiply", "gated", "none", None])
def test_the_loss_has_gradients_from_the_last_loops_only(injection):
    model, (xs, ys) = make_model(injection=injection), make_prompts()
    whole, truncated = model(xs, ys, loops=5), model(xs, ys, loops=5, graded=2)
    assert (len(whole), len(truncated)) == (5, 2)
    torch.testing.assert_close(truncated, whole[-2:])
    torch.stack(truncated).square().mean().backward()
    gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    missing = {"read_in.weight", "read_in.bias"} if injection in ("none", None) else set()  # the state has no gradient
    assert gradients == {name for name, _ in model.named_parameters()} - missing


def test_drawn_loops_and_curricula_follow_the_steps():
    curriculum = Curriculum(
        Rising(1, 3, 1, 2), Rising(4, 6, 2, 3), Rising(4, 4), window=2, drawn_loops=2
    )  # of dims every 2 steps, of points every 3
    one = objective(make_model(), curriculum, rows=5)
    batches = list(one.batches(0, 0))
    assert [batch.prompts.xs.shape for batch in batches] == [(5, n, 3) for n in (4, 4, 4, 6, 6, 6, 6)]
    assert [int((batch.prompts.xs != 0).any(dim=0).any(dim=0).sum()) for batch in batches] == [1, 1, 2, 2, 3, 3, 3]
    assert {batch.loops for batch in [*batches, *one.batches(1, 0)]} == {2, 3, 4}
    resumed = next(one.batches(0, 3))
    assert torch.equal(resumed.prompts.xs, batches[3].prompts.xs)
    later = next(one.batches(1, 0))
    assert not torch.equal(later.prompts.xs[:, :4], batches[0].prompts.xs)
    for other in ({"seed": 1}, {"number": 1}):
        drawn = objective(one.model, curriculum, rows=5, **other)
        assert not torch.equal(next(drawn.batches(0, 0)).prompts.xs, batches[0].prompts.xs)
    one.model.train()
    by_hand = torch.stack(one.model(*batches[3].prompts, batches[3].loops, 2)) - batches[3].prompts.ys
    assert one.loss(batches[3], 0.5).item() == pytest.approx(float(by_hand.square().mean().detach()))
    assert len(by_hand) == 2


def contraction():
    """Return a model whose state settles slowly, as training makes it."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    return model


def test_a_prompt_stops_where_its_state_has_settled():
    model, (xs, ys) = contraction(), make_prompts(32)
    path = trajectory(model, xs, ys[:, :-1], 40)
    np.testing.assert_allclose(path.predictions[4], model(xs, ys, loops=5)[-1][:, -1].detach(), rtol=1e-5)
    tolerance = float(np.median(path.residuals[4]))
    predictions, loops = path.stopped(tolerance)
    rows = np.arange(32)
    assert 1 < loops.min() < loops.max()
    assert (path.residuals[loops - 1, rows] <= tolerance).all()
    assert (path.residuals[loops - 2, rows] > tolerance).all()
    np.testing.assert_array_equal(predictions, path.predictions[loops - 1, rows])
    assert (path.stopped(0.0)[1] == 40).all()


def test_injections_are_those_of_their_formulas():
    (xs, ys), read = make_prompts(), []
    for injection in ("add", "multiply", "gated"):
        model = make_model(injection=injection)
        prompt = model.embed(xs, ys)
        state = torch.randn(prompt.shape, generator=torch.Generator().manual_seed(1))
        handle = model.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        model.step(state, prompt)
        handle.remove()
        gate = model.gate(torch.cat([state, prompt], dim=2)).sigmoid() if model.gate else 0
        wanted = {"add": state + prompt, "multiply": state * prompt, "gated": gate * state + (1 - gate) * prompt}
        torch.testing.assert_close(read[-1] - model.position.weight[:12], wanted[injection])
        first = model.first_state(prompt)
        assert (first == (injection == "multiply")).all()


def test_acceleration_reaches_the_same_fixed_point_in_fewer_loops():
    model, (xs, ys) = contraction(), make_prompts(32)
    plain, faster = (solve(model, xs, ys[:, :-1], 60) for solve in (trajectory, anderson))
    np.testing.assert_allclose(faster.predictions[-1], plain.predictions[-1], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(faster.predictions[0], plain.predictions[0])
    assert faster.stopped(1e-4)[1].mean() < 0.8 * plain.stopped(1e-4)[1].mean()


@pytest.mark.parametrize("injection", ["add", "multiply", "gated", "none"])
def test_the_graphs_compute_the_loops_of_prompts_of_any_length_side_by_side(injection):
    model = make_model(injection=injection)
    long, short = make_prompts(1), make_prompts(1, points=3, seed=1)
    embed, step = Embed(model), StepGraph(model)
    state, prompt, last = torch.zeros(2, 11, 16), torch.zeros(2, 11, 16), torch.tensor([[10], [4]])
    for row, (xs, ys) in enumerate((long, short)):
        tokens = 2 * xs.shape[1] - 1
        prompt[row, :tokens], state[row, :tokens] = (one[0] for one in embed(xs, ys[:, :-1]))
    for loops in range(1, 4):
        state, prediction, residual = step(state, prompt, last)
        for row, (xs, ys) in enumerate((long, short)):
            path = trajectory(model, xs, ys[:, :-1], loops)
            assert prediction[row].item() == pytest.approx(path.predictions[-1, 0], rel=1e-4, abs=1e-6)
            assert residual[row].item() == pytest.approx(path.residuals[-1, 0], rel=1e-4, abs=1e-6)


def test_more_dimensions_have_more_pairs_and_a_curriculum_as_long():
    five, ten = (training_plan("linear", LoopedOptions(dims=dims, rate=rate)) for dims, rate in ((None, 1), (10, 2)))
    assert [(plan.config.dims, plan.config.points) for plan in (five, ten)] == [(5, 11), (10, 21)]
    for solve, step in product((five.stages[0], ten.stages[0]), (0, solve_end := 899, solve_end + 1)):
        dims = solve.curriculum.dims
        assert dims.at(step) == 2 if step == 0 else (dims.at(step) == dims.end) is (step > solve_end)
    rates = [[stage.recipe.peak_learning_rate for stage in plan.stages] for plan in (five, ten)]
    assert rates[1] == [2 * rate for rate in rates[0]]


@pytest.mark.parametrize("unlooped", [False, True])
@pytest.mark.parametrize(
    ("size", "function", "all_steps", "grown"),  # after which shares of the steps dims, points and loops have grown
    [
        ("small", "tree", (1500, 500), [(0.6, 0.8, 0.6), (0.18, 0.24, 0)]),
        ("paper", "linear", (500_000, 20_000), [(0.15, 0.15, 0.008), (0.06, 0.06, 0)]),
    ],
)
def test_prompts_and_loops_have_grown_after_the_same_share_of_any_training(size, function, all_steps, grown, unlooped):
    for steps in all_steps:
        stage = training_plan(function, LoopedOptions(size, unlooped=unlooped, steps=steps)).stages[0]
        curriculum = stage.curriculum
        for rising, share in zip((curriculum.dims, curriculum.points, curriculum.loops), grown[unlooped], strict=True):
            last = round(share * stage.steps) + 2  # for rounding
            assert rising.at(last) == rising.end
            assert not share or rising.at(last - stage.steps // 100) < rising.end
