import numpy as np
import pytest
import torch
from torch import nn

from edge.errors import UsageError
from export.models.attention import MultiHeadAttention
from export.models.convert import to_onnx
from export.models.heads import NO_LABEL, SequenceClassifier, SpanClassifier, TokenClassifier
from export.models.transformer import LayerShape, Transformer, TransformerConfig

WIDTH, HEADS, HEAD_DIM = 16, 4, 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_attention_equals_torch(x, padding, padded, training):
    torch.manual_seed(1)
    ours = MultiHeadAttention(WIDTH, HEADS, HEAD_DIM).train(training)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    with torch.no_grad():
        projections = (ours.q_proj, ours.k_proj, ours.v_proj)
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        theirs.out_proj.load_state_dict(ours.output_proj.state_dict())
        want = theirs(x, x, x, key_padding_mask=padding == 0 if padded else None, need_weights=False)[0]
        got = ours(x, padding if padded else None)
    torch.testing.assert_close(got, want)


DIM, LENGTH = 24, 9
#: Heads by width 2 x 16 > d, 1 x 4 < d; no attention; no feed-forward.
SHAPES = (LayerShape(2, 16, 32), LayerShape(1, 4, 8, scale=0.9), LayerShape(0, 0, 16), LayerShape(3, 8, 0))
OPTIONS = {
    "bert": {"vocab_size": 40, "max_positions": 16, "segments": 2},
    "gpt2": {"vocab_size": 40, "max_positions": 16, "tanh_gelu": True},
    "vit": {"image_size": 16, "patch_size": 4, "channels": 3, "max_positions": 17},
}
CONFIGS = {name: TransformerConfig(architecture=name, dim=DIM, layers=SHAPES, **OPTIONS[name]) for name in OPTIONS}


def create(config):
    torch.manual_seed(0)
    model = Transformer(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def tokens():
    return torch.randint(0, 40, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask():
    return (torch.arange(LENGTH) < torch.tensor([[LENGTH], [5], [2]])).long()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_layers_have_their_own_shapes_and_a_missing_part_adds_its_constant(architecture, tokens):
    model = create(CONFIGS[architecture])
    layer = model.layers[2]
    assert (layer.attention, model.layers[3].feed_forward) == (None, None)
    x = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden = model(torch.randn(3, 3, 16, 16) if architecture == "vit" else tokens)
        assert hidden.shape == (3, 17 if architecture == "vit" else LENGTH, DIM)
        assert [one.feed_forward.hidden(hidden).shape[-1] for one in model.layers[:3]] == [32, 8, 16]
        added = x + layer.attention_constant
        if model.config.pre_norm:
            want = added + layer.feed_forward(layer.feed_forward_norm(added))
        else:
            added = layer.attention_norm(added)
            want = layer.feed_forward_norm(added + layer.feed_forward(added))
        torch.testing.assert_close(layer(x, None), want)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize("training", [False, True])
def test_padding_and_for_a_causal_model_later_tokens_change_nothing(architecture, training, tokens, mask):
    model = create(CONFIGS[architecture]).train(training)
    with torch.no_grad():
        padded = model(tokens, mask)
        for row, length in enumerate(mask.sum(dim=1).tolist()):
            alone = model(tokens[row : row + 1, :length])
            torch.testing.assert_close(padded[row, :length], alone[0], atol=1e-5, rtol=1e-5)
        if architecture == "gpt2":
            torch.testing.assert_close(model(tokens)[:, :4], model(tokens[:, :4]))


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


def test_answers_of_heads_and_their_agreement():
    transformer = create(CONFIGS["bert"])
    low, high = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    spans, labels = SpanClassifier(transformer), TokenClassifier(transformer, 3)
    answers = spans.answers([(low, high), (low, low)])
    assert answers.tolist() == [[0, 2], [0, 0]]
    assert spans.agreements(answers, np.array([[0, 2], [0, 1]])).tolist() == [1, 0]
    answers = labels.answers([torch.stack([low, high]), high[None]])
    assert answers.tolist() == [[0, 2], [2, NO_LABEL]]
    assert labels.agreements(answers, np.array([[0, 1], [2, NO_LABEL]])).tolist() == [0.5, 1]
    assert SequenceClassifier(transformer, 3).answers([low, high]).tolist() == [0, 2]
    assert SequenceClassifier(transformer, 1, regression=True).answers([low[:1], high[:1]]).tolist() == [1, 0]


def test_losses(tokens, mask):
    transformer = create(CONFIGS["bert"])
    logits, targets = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
    assert SequenceClassifier(transformer, 2).loss(logits, targets) == pytest.approx(0.6931, abs=1e-4)
    regression = SequenceClassifier(transformer, 1, regression=True)
    assert regression.loss(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 2.0])) == 2.0
    spans = SpanClassifier(transformer)
    even = torch.zeros(1, 4)
    assert spans.loss((even, even), torch.stack((targets, targets), dim=1)) == pytest.approx(1.3863, abs=1e-4)
    with torch.no_grad():
        start, end = spans(tokens, mask)
    assert start.shape == end.shape == (3, LENGTH)
    assert not torch.allclose(start, end)
    with pytest.raises(UsageError, match=r"labels of a regression: got 2, expected 1\. Give labels=1"):
        SequenceClassifier(transformer, 2, regression=True)


def test_tests_that_share_a_traced_graph_get_the_file_of_an_export_of_their_own(monkeypatch):
    def file(seed, rows, keys=None):
        torch.manual_seed(seed)
        model = MultiHeadAttention(4, 1, 4)
        if keys == "equal":  # with one initializer for both
            model.k_proj.load_state_dict(model.q_proj.state_dict())
        if keys == "shared":  # one tensor, whose initializer may have either name
            model.k_proj.weight = model.q_proj.weight
        inputs = {"x": torch.zeros(rows, 3, 4), "mask": torch.ones(rows, 3)}
        return to_onnx(model, inputs, ["y"], {name: {0: "batch"} for name in inputs})

    cases = (0, 2), (1, 3, "equal"), (3, 2, "shared"), (4, 2, "shared")
    kept = [file(*case) for case in cases]
    monkeypatch.setattr(torch.onnx, "export", torch.onnx.export.export)
    assert kept == [file(*case) for case in cases]
