"""Paper 002's mechanisms: scores, rotation, losses and smaller matrices."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from export.errors import ReductionError
from export.finetune.objectives import outputs_of
from export.finetune.predictions import predict
from export.finetune.recipe import FinetuningRecipe
from export.models.attention import MultiHeadAttention
from export.papers.adaptive.attention import AdaptiveAttention, HeadScorer, hard_keep, soft_keep
from export.papers.adaptive.measures import head_use
from export.papers.adaptive.scores import (
    GivenScores,
    GlobalScores,
    GroupedAttention,
    rotated_model,
    scored_modules,
    scorers,
    shrunk_model,
    with_scores,
)
from export.papers.adaptive.term import (
    AdaptiveObjective,
    Budget,
    Target,
    adaptive_loss,
    adaptive_term,
    adaptive_weight,
    temperature,
)
from tests.support.reduction_data import batches, inputs, model
from tests.support.task_data import Seen, accuracy_on, fine_tune, make_classifier, same

WIDTH, HEADS, HEAD_DIM = 16, 4, 4


def attention(mode, head_dim=HEAD_DIM):
    """Return an attention with a scorer, or without one for mode None, and the same weights each time."""
    torch.manual_seed(1)
    plain = MultiHeadAttention(WIDTH, HEADS, head_dim)
    return AdaptiveAttention(plain, mode, HeadScorer(WIDTH, HEADS)) if mode else plain


def set_scores(module, value):
    last = module.scorer.layers[-2]
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, math.log(value / (1 - value)) if value < 1 else 100.0)


@pytest.mark.parametrize("mode", ["literal", "fixed"])
@pytest.mark.parametrize("training", [True, False])
def test_full_scores_are_plain_attention_exactly(x, padding, mode, training):
    adaptive, plain = attention(mode).train(training), attention(None).train(training)
    set_scores(adaptive, 1.0)
    assert torch.equal(adaptive(x, padding), plain(x, padding))


def test_reduced_head_is_attention_on_its_first_coordinates(x):
    module = attention("fixed").eval()
    set_scores(module, 0.49)  # floor(4 * 0.49) = 1
    got = module(x)
    torch.testing.assert_close(module.scorer(x), torch.full((3, HEADS), 0.49))
    split = [p(x).unflatten(-1, (HEADS, HEAD_DIM)) for p in (module.q_proj, module.k_proj, module.v_proj)]
    q, k, v = (part.transpose(1, 2)[..., :1] for part in split)
    heads = ((q @ k.transpose(-1, -2)) / math.sqrt(HEAD_DIM)).softmax(-1) @ v
    padded = nn.functional.pad(heads, (0, HEAD_DIM - 1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, module.output_proj(padded))


@pytest.mark.parametrize(
    ("score", "rank_width", "kept"),
    # At the threshold, just below a coordinate, never less than one; literal: 19 of a head's 8, and 6.
    [(0.51, 8, 8), (0.5, 8, 4), (0.49, 8, 3), (0.01, 8, 1), (0.3, 64, 8), (0.1, 64, 6)],
)
def test_scores_choose_the_rank(score, rank_width, kept):
    assert hard_keep(torch.tensor([[score]]), rank_width, 8)[0, 0].tolist() == [1.0] * kept + [0.0] * (8 - kept)


def test_straight_through_gradient_is_that_of_the_soft_mask():
    torch.manual_seed(0)
    module = attention("fixed").double().train()
    scores = torch.rand(5, HEADS, dtype=torch.float64).requires_grad_()
    weights = torch.randn(5, HEADS, HEAD_DIM, dtype=torch.float64)
    keep = module.keep(scores)
    assert torch.equal(keep.detach(), hard_keep(scores, HEAD_DIM, HEAD_DIM))
    (found,) = torch.autograd.grad((keep * weights).sum(), scores)
    (wanted,) = torch.autograd.grad((soft_keep(scores, HEAD_DIM, HEAD_DIM) * weights).sum(), scores)
    torch.testing.assert_close(found, wanted)
    for warmth in (1.0, 8.0):
        assert torch.autograd.gradcheck(lambda s, warmth=warmth: soft_keep(s, HEAD_DIM, HEAD_DIM, warmth), (scores,))


@pytest.mark.parametrize(("mode", "value", "sign"), [("fixed", 0.5, 1), ("literal", 0.5 / HEADS, -1)])
def test_adaptive_losses_and_their_weight(mode, value, sign):
    scores = [torch.full((2, HEADS), one).requires_grad_() for one in (0.25, 0.75)]
    loss = adaptive_loss(scores, mode)
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert all((score.grad.sign() == sign).all() for score in scores)
    assert list(map(adaptive_weight, (0.0999, 0.1, 0.95, 0.975, 1.0))) == pytest.approx([0, 0.01, 0.01, 0.03, 0.05])


def test_a_scorer_starts_above_the_threshold_and_ignores_padding(x, padding):
    scorer = HeadScorer(WIDTH, HEADS)
    assert [m.out_features for m in scorer.layers if isinstance(m, nn.Linear)] == [WIDTH // 4, WIDTH // 4, HEADS]
    assert ((scorer(x) > 0.5) & (scorer(x) < 1)).all(), "training starts from full heads"
    noisy = torch.where(padding[:, :, None] == 1, x, torch.full_like(x, 1e3))
    torch.testing.assert_close(scorer(noisy, padding), scorer(x, padding))
    torch.testing.assert_close(scorer(x[1:2], padding[1:2]), scorer(x[1:2, :4]))


def test_the_loss_is_the_lagrangian_and_its_multipliers_rise_above_the_target():
    budget = Budget(0.5)
    budget.multipliers.copy_(torch.tensor([0.3, 2.0]))
    assert budget.loss(torch.tensor(0.9), 1.0).item() == pytest.approx(0.3 * 0.4 + 2 * 0.4**2)
    budget.ascend(torch.tensor(0.9), 1.0)
    above = budget.multipliers.clone()
    assert (above > torch.tensor([0.3, 2.0])).all()
    budget.ascend(torch.tensor(0.4), 1.0)
    assert 0 < budget.multipliers[0] < above[0]
    assert budget.multipliers[1] == above[1]
    budget.multipliers[0] = 0.001
    budget.ascend(torch.tensor(0.0), 1.0)
    assert budget.multipliers[0] == 0, "an inequality's multiplier"


def test_the_target_falls_and_the_gates_cool():
    assert [Budget(0.5).target_at(p) for p in (0, 0.1, 0.3, 0.5, 1)] == pytest.approx([1, 1, 0.75, 0.5, 0.5])
    assert [temperature(p) for p in (0, 0.5, 1)] == [8, 4.5, 1]
    module, gradients = attention("budget", 64).train(), []
    for module.rank_temperature in (8.0, 0.1):
        scores = torch.full((1, 4), 0.3, requires_grad=True)
        module.keep(scores)[0, :, 24].sum().backward()
        gradients.append(scores.grad)
    assert (gradients[0] > gradients[1]).all(), "warm gates have a gradient some way beyond the last coordinate"


@pytest.fixture(scope="module")
def original():
    return model()


@pytest.fixture(scope="module")
def rotated(original):
    return rotated_model(original, batches())


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_full_rank_reproduces_every_output(architecture):
    original = model(architecture=architecture).double()
    new = rotated_model(original, batches())
    for batch in batches(seed=1):  # other inputs than those of the calibration
        if architecture == "gpt2":
            batch = batch._replace(segments=None)
        torch.testing.assert_close(outputs_of(new, batch), outputs_of(original, batch), atol=1e-9, rtol=1e-7)
    assert not same(new, original)


def test_the_first_coordinates_are_the_best(original, rotated):
    """Half of the coordinates in calibrated order change the outputs less than half in the original order."""
    rows = inputs(seed=2)
    wanted = predict(original, rows).logits
    half = [
        with_scores(one, "fixed", lambda attention, number: GivenScores(torch.full((4,), 0.5)))
        for one in (original, rotated)
    ]
    as_they_come, ordered = (np.square(predict(one, rows).logits - wanted).mean() for one in half)
    assert ordered < as_they_come / 2


def test_dropped_coordinates_are_replaced_by_their_mean(rotated):
    attention, sums, tokens = rotated.transformer.layers[0].attention, 0.0, 0
    for batch in batches():
        read = []
        handle = attention.output_proj.register_forward_hook(lambda _, rows, output, read=read: read.append(rows[0]))
        with torch.no_grad():
            attention(rotated.transformer.embeddings(batch.inputs, batch.segments), batch.mask)
        handle.remove()
        real = read[0][batch.mask.bool()]
        sums, tokens = sums + real.sum(dim=0), tokens + len(real)
    assert (sums / tokens).abs().max() < 1e-4


def test_scorers_depend_on_seed_and_layer_only(rotated):
    one, again, other = (with_scores(rotated, "fixed", scorers(seed)).state_dict() for seed in (0, 0, 1))
    names = [f"transformer.layers.{layer}.attention.scorer.layers.0.weight" for layer in (0, 1)]
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one[names[0]], other[names[0]])
    assert not torch.equal(one[names[0]], one[names[1]])
    assert one[names[0]].shape[0] == 6  # d / 4


def test_broken_models_and_small_calibration_sets_are_rejected(original):
    broken = model()
    with torch.no_grad():
        broken.classifier.weight[0, 0] = torch.nan
    with pytest.raises(ReductionError, match="finite"):
        rotated_model(broken, batches())
    with pytest.raises(ReductionError, match="more than 48"):
        rotated_model(original, batches(rows=2))


@pytest.mark.parametrize(
    ("scores", "widths"),
    [([0.9] * 4, [16]), ([0.9, 0.1, 0.45, 0.9], [8, 16]), ([0.06] * 4, [8])],  # one coordinate, in a matrix of 8
)
def test_smaller_matrices_return_the_same(scores, widths):
    narrow = rotated_model(model(head_dim=16), batches())
    masked = with_scores(narrow, "fixed", lambda attention, number: GivenScores(torch.tensor(scores))).eval()
    small, rows = shrunk_model(masked), inputs(seed=4)
    np.testing.assert_allclose(predict(small, rows).logits, predict(masked, rows).logits, atol=1e-5)
    attention = small.transformer.layers[0].attention
    groups = attention.groups if isinstance(attention, GroupedAttention) else [attention]
    assert ([group.head_dim for group in groups], sum(group.num_heads for group in groups)) == (widths, 4)


def test_scores_that_depend_on_the_input_are_rejected(rotated):
    with pytest.raises(ReductionError, match="HeadScorer in mode fixed"):
        shrunk_model(with_scores(rotated, "fixed", scorers(0)))


@pytest.fixture(scope="module")
def learnt(train, holdout):
    dense = make_classifier()
    recipe = FinetuningRecipe(epochs=3, batch_size=32, peak_learning_rate=2e-2)
    fine_tune(dense, train, recipe, evaluate=accuracy_on(dense, holdout))
    return rotated_model(dense, [train.batch(np.arange(64))])


def trained(learnt, train, holdout, mode, kind, epochs=2, scorer=None, **options):
    """Return the trained model, the use of its heads before and after, and what the training returned."""
    recipe = FinetuningRecipe(epochs=epochs, batch_size=32, peak_learning_rate=2e-3, min_delta=-math.inf)
    model = with_scores(learnt, mode, scorer or scorers(0))
    before = head_use(model, holdout)
    with adaptive_term(model, kind) as term:
        tuned = fine_tune(
            model,
            train,
            recipe,
            evaluate=accuracy_on(model, holdout),
            objective=partial(AdaptiveObjective, term=term),
            **options,
        )
    return model, before, head_use(model, holdout), tuned


@pytest.mark.parametrize(
    ("scorer", "epochs", "rate"), [(None, 6, 30), (lambda attention, _: GlobalScores(attention.num_heads), 4, 100)]
)
def test_a_budget_reaches_its_target(learnt, train, holdout, scorer, epochs, rate):
    model, _, after, tuned = trained(learnt, train, holdout, "budget", Target(0.6, rate=rate), epochs, scorer)
    assert after.kept == pytest.approx(0.6, abs=0.1)
    assert "budget" not in dict(model.named_children()), "it is part of the training only"
    if scorer is None:
        assert tuned.scores[-1] > 0.9
    else:
        assert after.spread == pytest.approx(0, abs=1e-6)


def test_the_task_trains_the_scorer_in_the_modes_with_a_gradient(learnt, train):
    assert head_use(learnt, train) is None
    batch = train.batch(np.arange(16))
    for mode, expected in (("literal", False), ("fixed", True), ("budget", True)):
        model = with_scores(learnt, mode, scorers(0)).train()
        model.loss(outputs_of(model, batch), batch.targets).backward()
        gradients = [p.grad for a in scored_modules(model) for p in a.scorer.parameters()]
        assert any(g is not None and g.abs().sum() > 0 for g in gradients) is expected


def test_an_interrupted_budget_ends_with_the_same_bits(learnt, train, holdout, tmp_path):
    whole = trained(learnt, train, holdout, "budget", Target(0.6))[0]
    options = {"state": tmp_path / "state", "save_every": 3}
    with pytest.raises(KeyboardInterrupt):
        trained(learnt, train, holdout, "budget", Target(0.6), observer=Seen(4), **options)
    assert same(whole, trained(learnt, train, holdout, "budget", Target(0.6), **options)[0])
