import msgspec
import pytest
import torch
from torch import nn

from edge.errors import UsageError
from export.heads import SequenceClassifier, SpanClassifier
from export.transformer import LayerShape, Transformer, TransformerConfig

DIM, LENGTH = 24, 9
#: Heads by width 3 x 8 = d, 2 x 16 > d, 1 x 4 < d; no attention; no feed-forward.
SHAPES = (
    LayerShape(3, 8, 48),
    LayerShape(2, 16, 32),
    LayerShape(1, 4, 8, scale=0.9),
    LayerShape(0, 0, 16),
    LayerShape(3, 8, 0),
)
CONFIGS = {
    "bert": TransformerConfig(architecture="bert", dim=DIM, layers=SHAPES, vocab_size=40, max_positions=16, segments=2),
    "gpt2": TransformerConfig(
        architecture="gpt2", dim=DIM, layers=SHAPES, vocab_size=40, max_positions=16, tanh_gelu=True
    ),
    "vit": TransformerConfig(
        architecture="vit", dim=DIM, layers=SHAPES, image_size=16, patch_size=4, channels=3, max_positions=17
    ),
}


def create(config):
    torch.manual_seed(0)
    model = Transformer(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(params=CONFIGS)
def model(request):
    return create(CONFIGS[request.param])


@pytest.fixture
def tokens():
    return torch.randint(0, 40, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask():
    return (torch.arange(LENGTH) < torch.tensor([[LENGTH], [5], [2]])).long()


def inputs_of(model):
    generator = torch.Generator().manual_seed(1)
    if model.config.architecture == "vit":
        return torch.randn(3, 3, 16, 16, generator=generator)
    return torch.randint(0, 40, (3, LENGTH), generator=generator)


def test_every_layer_has_its_own_shape(model):
    with torch.no_grad():
        hidden = model(inputs_of(model))
    assert hidden.shape == (3, 17 if model.config.architecture == "vit" else LENGTH, DIM)
    for layer, shape in zip(model.layers, SHAPES, strict=True):
        width = shape.num_heads * shape.head_dim
        if shape.num_heads:
            assert layer.attention.q_proj.weight.shape == (width, DIM)
            assert layer.attention.output_proj.weight.shape == (DIM, width)
        if shape.ffn_dim:
            assert layer.feed_forward.up.weight.shape == (shape.ffn_dim, DIM)
            assert layer.feed_forward.hidden(hidden).shape[-1] == shape.ffn_dim


def test_a_missing_sub_layer_costs_nothing_and_adds_its_constant(model):
    without_attention, without_feed_forward = model.layers[3], model.layers[4]
    assert without_attention.attention is None
    assert without_feed_forward.feed_forward is None
    x = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(2))
    constant = without_attention.attention_constant
    with torch.no_grad():
        got = without_attention(x, None)
        if model.config.pre_norm:
            added = x + constant
            want = added + without_attention.feed_forward(without_attention.feed_forward_norm(added))
        else:
            added = without_attention.attention_norm(x + constant)
            want = without_attention.feed_forward_norm(added + without_attention.feed_forward(added))
    torch.testing.assert_close(got, want)


def test_dropping_an_attention_with_a_constant_output_changes_nothing(tokens):
    """Heads whose values are all zero give the bias of their output; a layer without them gives the same."""
    whole = create(msgspec.structs.replace(CONFIGS["bert"], layers=(LayerShape(3, 8, 48),)))
    nn.init.zeros_(whole.layers[0].attention.v_proj.weight)
    nn.init.zeros_(whole.layers[0].attention.v_proj.bias)
    dropped = create(msgspec.structs.replace(CONFIGS["bert"], layers=(LayerShape(0, 0, 48),)))
    weights = {name: tensor for name, tensor in whole.state_dict().items() if name in dropped.state_dict()}
    weights["layers.0.attention_constant"] = whole.layers[0].attention.output_proj.bias
    dropped.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(dropped(tokens), whole(tokens))


def test_the_scale_is_kept(tokens):
    """Half of the query's weights and twice the scale are the same attention."""
    default, scaled = (
        create(msgspec.structs.replace(CONFIGS["bert"], layers=(LayerShape(2, 16, 32, scale=scale),)))
        for scale in (None, 0.5)
    )
    assert default.layers[0].attention.scale == 0.25
    assert scaled.layers[0].attention.scale == 0.5
    with torch.no_grad():
        assert not torch.allclose(default(tokens), scaled(tokens), atol=1e-3)
        for parameter in scaled.layers[0].attention.q_proj.parameters():
            parameter /= 2
        torch.testing.assert_close(default(tokens), scaled(tokens))


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_nothing(architecture, training, tokens, mask):
    model = create(CONFIGS[architecture]).train(training)
    with torch.no_grad():
        padded = model(tokens, mask)
        for row, length in enumerate(mask.sum(dim=1).tolist()):
            alone = model(tokens[row : row + 1, :length])
            torch.testing.assert_close(padded[row, :length], alone[0], atol=1e-5, rtol=1e-5)


def test_a_causal_model_does_not_look_ahead(tokens):
    model = create(CONFIGS["gpt2"])
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 40
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :4], model(changed)[:, :4])


def test_segments_default_to_the_first(tokens):
    model = create(CONFIGS["bert"])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), model(tokens, None, torch.zeros_like(tokens)))
        assert not torch.allclose(model(tokens), model(tokens, None, torch.ones_like(tokens)), atol=1e-3)


@pytest.mark.parametrize("pooling", ["mean", "summary"])
def test_a_sequence_classifier_does_not_read_padding(pooling, tokens, mask):
    model = SequenceClassifier(create(CONFIGS["bert"]), 4, pooling).eval()
    with torch.no_grad():
        logits = model(tokens, mask)
        assert logits.shape == (3, 4)
        torch.testing.assert_close(logits, model(tokens * mask, mask))
        hidden = model.transformer(tokens[1:2, :5])
        pooled = hidden[:, 0] if pooling == "summary" else hidden.mean(dim=1)
        torch.testing.assert_close(logits[1:2], model.classifier(pooled), atol=1e-5, rtol=1e-5)


def test_losses(tokens, mask):
    transformer = create(CONFIGS["bert"])
    logits, targets = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
    assert SequenceClassifier(transformer, 2).loss(logits, targets) == pytest.approx(0.6931, abs=1e-4)
    regression = SequenceClassifier(transformer, 1, regression=True)
    assert regression.loss(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 2.0])) == 2.0
    spans = SpanClassifier(transformer)
    even = torch.zeros(1, 4)
    assert spans.loss((even, even), (targets, targets)) == pytest.approx(1.3863, abs=1e-4)
    with torch.no_grad():
        start, end = spans(tokens, mask)
    assert start.shape == end.shape == (3, LENGTH)
    assert not torch.allclose(start, end)
    with pytest.raises(UsageError, match=r"labels of a regression: got 2, expected 1\. Give labels=1"):
        SequenceClassifier(transformer, 2, regression=True)
