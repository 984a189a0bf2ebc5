import math

import pytest
import torch
from torch import nn

from export.attention import HeadScorer, MultiHeadAttention, adaptive_loss, adaptive_weight, hard_keep, soft_keep

DIM, HEADS, HEAD_DIM = 16, 4, 4


@pytest.fixture
def x():
    return torch.randn(3, 6, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mask():
    return torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2, [1.0] + [0.0] * 5])


def attention(adaptive=None):
    torch.manual_seed(1)
    return MultiHeadAttention(DIM, HEADS, HEAD_DIM, adaptive)


def set_scores(module, value):
    """Make the scorer answer ``value`` whatever it reads."""
    last = module.scorer.layers[-2]
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, math.log(value / (1 - value)) if value < 1 else 100.0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_equals_torch(x, mask, padded, training):
    ours = attention().train(training)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True).eval()
    with torch.no_grad():
        projections = (ours.q_proj, ours.k_proj, ours.v_proj)
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        theirs.out_proj.load_state_dict(ours.output_proj.state_dict())
        want = theirs(x, x, x, key_padding_mask=mask == 0 if padded else None, need_weights=False)[0]
        got, scores = ours(x, mask if padded else None)
    torch.testing.assert_close(got, want)
    assert scores is None


@pytest.mark.parametrize("mode", ["literal", "fixed"])
@pytest.mark.parametrize("training", [True, False])
def test_full_scores_are_plain_attention_exactly(x, mask, mode, training):
    adaptive, plain = attention(mode).train(training), attention().train(training)
    plain.load_state_dict(adaptive.state_dict(), strict=False)
    set_scores(adaptive, 1.0)
    assert torch.equal(adaptive(x, mask)[0], plain(x, mask)[0])


def test_reduced_head_is_attention_on_its_first_coordinates(x):
    module = attention("fixed").eval()
    set_scores(module, 0.49)  # floor(4 * 0.49) = 1
    got, scores = module(x)
    torch.testing.assert_close(scores, torch.full((3, HEADS), 0.49))
    split = [p(x).unflatten(-1, (HEADS, HEAD_DIM)) for p in (module.q_proj, module.k_proj, module.v_proj)]
    q, k, v = (part.transpose(1, 2)[..., :1] for part in split)
    heads = ((q @ k.transpose(-1, -2)) / math.sqrt(HEAD_DIM)).softmax(-1) @ v
    padded = nn.functional.pad(heads, (0, HEAD_DIM - 1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, module.output_proj(padded))


@pytest.mark.parametrize(
    ("score", "rank_width", "kept"),
    [
        (0.51, 8, 8),
        (0.5, 8, 4),  # not above the threshold
        (0.49, 8, 3),
        (0.125, 8, 1),
        (0.01, 8, 1),  # never less than one
        (0.3, 64, 8),  # literal: 19 of a head's 8
        (0.1, 64, 6),
    ],
)
def test_rank(score, rank_width, kept):
    keep = hard_keep(torch.tensor([[score]]), rank_width, 8)
    assert keep[0, 0].tolist() == [1.0] * kept + [0.0] * (8 - kept)


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
    assert torch.autograd.gradcheck(lambda scores: soft_keep(scores, HEAD_DIM, HEAD_DIM), (scores,))


def test_soft_mask_stays_near_the_hard_one():
    scores = torch.linspace(0.01, 0.99, 50)[:, None]
    soft = soft_keep(scores, 64, 64)
    assert ((soft >= 0) & (soft <= 1)).all()
    assert (soft.diff(dim=0) >= -1e-6).all(), "a higher score keeps more"
    assert (soft - hard_keep(scores, 64, 64)).abs().mean() < 0.1


@pytest.mark.parametrize(("mode", "value", "sign"), [("fixed", 0.5, 1), ("literal", 0.5 / HEADS, -1)])
def test_adaptive_losses(mode, value, sign):
    scores = [torch.full((2, HEADS), one).requires_grad_() for one in (0.25, 0.75)]
    loss = adaptive_loss(scores, mode)
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert all((score.grad.sign() == sign).all() for score in scores)


def test_masked_mean_ignores_padding(x, mask):
    scorer = HeadScorer(DIM, HEADS)
    noisy = torch.where(mask[:, :, None] == 1, x, torch.full_like(x, 1e3))
    torch.testing.assert_close(scorer(noisy, mask), scorer(x, mask))
    torch.testing.assert_close(scorer(x[1:2], mask[1:2]), scorer(x[1:2, :4]))


def test_scorer_is_paper_002s(x):
    scorer = HeadScorer(DIM, HEADS)
    assert [m.out_features for m in scorer.layers if isinstance(m, nn.Linear)] == [DIM // 4, DIM // 4, HEADS]
    scores = scorer(x)
    assert scores.shape == (3, HEADS)
    assert ((scores > 0.5) & (scores < 1)).all(), "training starts from full heads"


@pytest.mark.parametrize(
    ("progress", "weight"),
    [(0.0, 0.0), (0.0999, 0.0), (0.1, 0.01), (0.9499, 0.01), (0.95, 0.01), (0.975, 0.03), (1.0, 0.05)],
)
def test_lambda_schedule(progress, weight):
    assert adaptive_weight(progress) == pytest.approx(weight)
