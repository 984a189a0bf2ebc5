import json

import msgspec
import pytest
import safetensors.torch
import torch

from export.errors import CheckpointError
from export.models.attention import bucket_table, buckets
from export.models.huggingface import CLASSIFIERS, CONFIG, FORMATS, INDEX, POOLERS, WEIGHTS, load_pretrained
from export.models.transformer import Transformer
from tests.support.imported_directories import random_model
from tests.support.marks import with_transformers
from tests.support.task_data import same

LENGTH = 12
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "bert": ENCODER | {"hidden_act": "gelu", "vocab_size": 50, "max_position_embeddings": 20, "type_vocab_size": 2},
    "vit": ENCODER | {"hidden_act": "gelu", "image_size": 16, "patch_size": 4, "num_channels": 3},
    "roberta": ENCODER | {"hidden_act": "gelu", "vocab_size": 50, "max_position_embeddings": 22, "type_vocab_size": 1},
    "mpnet": ENCODER | {"hidden_act": "gelu", "vocab_size": 50, "max_position_embeddings": 22},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 50}
    | {"max_position_embeddings": 20},
}
#: Architecture, class, whether it has a pooler, and the shape of its classifier.
HEADS = [
    ("bert", "BertModel", True, None),
    ("bert", "BertForSequenceClassification", True, (3, 32)),
    ("bert", "BertForQuestionAnswering", False, (2, 32)),
    ("roberta", "RobertaModel", True, None),
    ("roberta", "RobertaForSequenceClassification", True, (3, 32)),
    ("roberta", "RobertaForTokenClassification", False, (3, 32)),
    ("roberta", "RobertaForMaskedLM", False, None),
    ("mpnet", "MPNetModel", True, None),
    ("mpnet", "MPNetForSequenceClassification", True, (3, 32)),
    ("distilbert", "DistilBertForMaskedLM", False, None),
    ("distilbert", "DistilBertForSequenceClassification", True, (3, 32)),
    ("distilbert", "DistilBertForQuestionAnswering", False, (2, 32)),
    ("vit", "ViTForImageClassification", False, (3, 32)),
]


def write(directory, architecture, prefix=""):
    """Write a small model with random weights, in the names of Hugging Face."""
    form = FORMATS[architecture]
    fields = {"model_type": architecture, **CONFIGS[architecture]}
    ours = Transformer(msgspec.convert(fields, form.fields).config()).state_dict()
    generator = torch.Generator().manual_seed(0)
    weights = {
        prefix + theirs: torch.randn(form.shape(name, ours[name].shape), generator=generator)
        for name, theirs in form.names(ours).items()
    }
    directory.mkdir(exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(fields))
    safetensors.torch.save_file(weights, directory / WEIGHTS)
    return directory


@pytest.fixture
def bert(tmp_path):
    return write(tmp_path / "bert", "bert")


def changed(directory, change):
    """Change the weights of a model, a map from names to tensors; None removes one."""
    weights = change(safetensors.torch.load_file(directory / WEIGHTS))
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    safetensors.torch.save_file(weights, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        *((name, lambda w, p=FORMATS[name].prefix: {p + key: tensor for key, tensor in w.items()}) for name in CONFIGS),
        ("bert", lambda w: w | {"embeddings.position_ids": torch.arange(20), "cls.predictions.bias": torch.zeros(50)}),
        ("bert", lambda w: {name.replace("LayerNorm.weight", "LayerNorm.gamma"): t for name, t in w.items()}),
        ("bert", lambda w: {name.replace("LayerNorm.bias", "LayerNorm.beta"): t for name, t in w.items()}),
    ],
)
def test_other_versions_of_a_file_load_the_same(architecture, change, tmp_path):
    directory = write(tmp_path / "model", architecture)
    before = load_pretrained(directory).transformer
    changed(directory, change)
    assert same(before, load_pretrained(directory).transformer)
    changed(directory, lambda weights: {name: tensor.half() for name, tensor in weights.items()})
    halves = load_pretrained(directory).transformer.state_dict().values()
    assert {tensor.dtype for tensor in halves} == {torch.float32}


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        (CONFIG, None, "config.json: got No such file or directory, expected a file"),
        (WEIGHTS, None, "model.safetensors: got nothing there, expected a file"),
        (CONFIG, b"{", "config.json: got Input data was truncated, expected the JSON of a Hugging Face model"),
        (WEIGHTS, b"no weights", "model.safetensors: got .*, expected a safetensors file"),
        (INDEX, b'{"weight_map": {"a": "../secret.safetensors"}}', f"{INDEX}: got .*regex.*, expected the JSON of a"),
    ],
)
def test_missing_and_malformed_files(file, data, message, bert):
    (bert / file).unlink(missing_ok=True)
    if data is not None:
        (bert / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(bert)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a random model of the package transformers and returns it with its directory."""

    def save(architecture, kind):
        model = random_model(kind, CONFIGS[architecture] | {"num_labels": 2 if kind.endswith("Answering") else 3})
        directory = tmp_path_factory.mktemp(kind)
        model.save_pretrained(directory)
        return model, directory

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
            ids = torch.randint(2, 50, (3, LENGTH), generator=generator)  # RoBERTa gives a 1, its padding, no position
            mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [1]])).long()
            segments = torch.randint(0, 2, ids.shape, generator=generator) if architecture == "bert" else None
            more = {"token_type_ids": segments} if architecture == "bert" else {}
            want = base(input_ids=ids, attention_mask=mask, **more).last_hidden_state
            difference = (ours.transformer(ids, mask, segments) - want) * mask[:, :, None]
    assert difference.abs().max() < 1e-5
    assert (ours.pooler is not None) == pooler
    assert (None if ours.classifier is None else tuple(ours.classifier.weight.shape)) == classifier
    linear = {
        name.removeprefix(f"{theirs.base_model_prefix}."): part
        for name, part in theirs.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    for head, names in ((ours.pooler, POOLERS), (ours.classifier, CLASSIFIERS)):
        assert head is None or same(head, next(linear[name] for name in names if name in linear))


@with_transformers
def test_buckets_of_distances_are_those_of_mpnet():
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    position = torch.arange(300)
    want = MPNetEncoder.relative_position_bucket(position[None, :] - position[:, None])
    assert torch.equal(buckets(300, bucket_table(32)), want)


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


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("bert", {"model_type": "t5"}, r"field model_type: got 't5', expected one of bert, .*, vit\. Download"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads: got 5, expected a divisor of hidden_size, 32"),
        ("distilbert", {"n_heads": 5}, "field n_heads: got 5, expected a divisor of dim, 32"),
        ("vit", {"patch_size": 5}, "field patch_size: got 5, expected a divisor of image_size, 16"),
        ("bert", {"is_decoder": True}, "field is_decoder: got True, expected False"),
        ("vit", {"qkv_bias": False}, "field qkv_bias: got False, expected True"),
        ("bert", {"hidden_act": "relu"}, r"got Invalid enum value 'relu' - at `\$\.hidden_act`, expected the JSON"),
        ("bert", {"position_embedding_type": "relative_key"}, r"relative_key.*position_embedding_type"),
    ],
)
def test_configurations_that_are_not_supported(architecture, changes, message, tmp_path):
    directory = write(tmp_path / architecture, architecture)
    (directory / CONFIG).write_text(json.dumps({**json.loads((directory / CONFIG).read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(directory)


NORM, DENSE = "embeddings.LayerNorm.bias", "encoder.layer.{}.output.dense.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (DENSE.format(1), None, "got no such tensor, expected the tensors that follow from config.json"),
        (DENSE.format(2), torch.zeros(32), "got a tensor that this architecture lacks"),
        (NORM, torch.zeros(31), r"got F32 \[31\], expected \[32\] of F64"),
        (NORM, torch.zeros(32, dtype=torch.int32), r"got I32 \[32\], expected \[32\] of F64"),
        (NORM, torch.full((32,), torch.nan), "got NaN or Inf, expected finite weights"),
        ("classifier.weight", torch.zeros(3, 31), r"got F32 \[3, 31\], expected \[3, 32\]"),
        ("classifier.bias", torch.zeros(3), "got a tensor that this architecture lacks"),
    ],
)
def test_tensors_that_do_not_fit(name, tensor, message, bert):
    changed(bert, lambda weights: {**weights, name: tensor})
    with pytest.raises(CheckpointError, match=f"tensor '{name}': {message}"):
        load_pretrained(bert)
