import msgspec
import numpy as np
import pytest
import torch

from export.papers.looped.functions import draw_prompts
from export.papers.looped.graphs import Embed, StepGraph
from export.papers.looped.model import PromptConfig, PromptTransformer, gpt2_shapes
from export.papers.looped.objective import Curriculum, PromptObjective, Rising
from export.papers.looped.recipes import plan_of
from export.papers.looped.solvers import anderson, stopped, trajectory

CONFIG = PromptConfig(dims=3, points=6, dim=16, shapes=gpt2_shapes(16, 2, 1))


def make_model(**options):
    torch.manual_seed(0)
    return PromptTransformer(msgspec.structs.replace(CONFIG, **options)).eval()


def make_prompts(number=4, points=6, seed=0):
    return draw_prompts("linear", number, points, 3, torch.Generator().manual_seed(seed))


def test_parameter_counts_are_those_of_the_papers():
    assert PromptTransformer(plan_of("linear", "small").config).parameter_count == 50_561
    paper = PromptTransformer(plan_of("linear", "paper").config).parameter_count
    unlooped = PromptTransformer(plan_of("linear", "paper", injection=None).config).parameter_count
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
    models = [make_model(injection=injection) for injection in ("add", "multiply", "none")]
    curriculum = Curriculum(Rising(3, 3), Rising(6, 6), Rising(4, 4))
    assert len({PromptObjective(model, "linear", curriculum, seed=0).fingerprint() for model in models}) == 3
    again = {PromptObjective(models[0], "linear", curriculum, seed=0).fingerprint() for _ in range(2)}
    assert len(again) == 1


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


def test_injections_differ():
    xs, ys = make_prompts()
    found = [make_model(injection=one)(xs, ys, loops=3)[-1] for one in ("add", "multiply", "gated", "none")]
    for number, one in enumerate(found):
        assert not any(torch.allclose(one, other) for other in found[number + 1 :])


def test_drawn_loops_and_curricula_follow_the_steps():
    curriculum = Curriculum(
        Rising(1, 3, 1, 2), Rising(4, 6, 2, 3), Rising(4, 4), window=2, drawn_loops=2
    )  # of dims every 2 steps, of points every 3
    objective = PromptObjective(make_model(), "linear", curriculum, seed=0, batch_size=5, steps_per_epoch=7)
    batches = list(objective.batches(0, 0))
    assert [batch.prompts.xs.shape for batch in batches] == [(5, n, 3) for n in (4, 4, 4, 6, 6, 6, 6)]
    assert [int((batch.prompts.xs != 0).any(dim=0).any(dim=0).sum()) for batch in batches] == [1, 1, 2, 2, 3, 3, 3]
    assert {batch.loops for batch in [*batches, *objective.batches(1, 0)]} == {2, 3, 4}
    resumed = next(objective.batches(0, 3))
    assert torch.equal(resumed.prompts.xs, batches[3].prompts.xs)
    later = next(objective.batches(1, 0))
    assert not torch.equal(later.prompts.xs[:, :4], batches[0].prompts.xs)
    for other in ({"seed": 1}, {"seed": 0, "stage": 1}):
        drawn = PromptObjective(objective.model, "linear", curriculum, batch_size=5, steps_per_epoch=7, **other)
        assert not torch.equal(next(drawn.batches(0, 0)).prompts.xs, batches[0].prompts.xs)
    objective.model.train()
    by_hand = torch.stack(objective.model(*batches[3].prompts, batches[3].loops, 2)) - batches[3].prompts.ys
    assert objective.loss(batches[3], 0.5).item() == pytest.approx(float(by_hand.square().mean().detach()))
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
    result = stopped(path, tolerance)
    rows = np.arange(32)
    assert 1 < result.loops.min() < result.loops.max()
    assert (path.residuals[result.loops - 1, rows] <= tolerance).all()
    assert (path.residuals[result.loops - 2, rows] > tolerance).all()
    np.testing.assert_array_equal(result.predictions, path.predictions[result.loops - 1, rows])
    assert (stopped(path, 0.0).loops == 40).all()


def test_anderson_reaches_the_fixed_point_in_fewer_loops():
    model, (xs, ys) = contraction(), make_prompts(32)
    plain, fast = (solve(model, xs, ys[:, :-1], 12) for solve in (trajectory, anderson))
    assert np.median(fast.residuals[9]) < 0.5 * np.median(plain.residuals[9])
    fixed = trajectory(model, xs, ys[:, :-1], 400).predictions[-1]
    assert np.abs(fast.predictions[-1] - fixed).max() < np.abs(plain.predictions[-1] - fixed).max()


def test_anderson_stays_where_the_state_no_longer_changes():
    model, (xs, ys) = make_model(), make_prompts()
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(1)  # the state from the first loop on
    path = anderson(model, xs, ys[:, :-1], 6, memory=2)
    assert (path.residuals[1:] == 0).all()
    assert np.isfinite(path.predictions).all()


def test_the_graphs_compute_the_loops_of_prompts_of_any_length_side_by_side():
    model = make_model()
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


@pytest.mark.parametrize("injection", ["add", None])
@pytest.mark.parametrize(
    ("size", "function", "all_steps", "grown"),  # after which shares of the steps dims, points and loops have grown
    [
        ("small", "tree", (1500, 500), {"add": (0.6, 0.8, 0.6), None: (0.18, 0.24, 0)}),
        ("paper", "linear", (500_000, 20_000), {"add": (0.15, 0.15, 0.008), None: (0.06, 0.06, 0)}),
    ],
)
def test_prompts_and_loops_have_grown_after_the_same_share_of_any_training(size, function, all_steps, grown, injection):
    for steps in all_steps:
        stage = plan_of(function, size, injection=injection, steps=steps).stages[0]
        curriculum = stage.curriculum
        for rising, share in zip((curriculum.dims, curriculum.points, curriculum.loops), grown[injection], strict=True):
            last = round(share * stage.steps) + 2  # for rounding
            assert rising.at(last) == rising.end
            assert not share or rising.at(last - stage.steps // 100) < rising.end
