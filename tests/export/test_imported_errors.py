"""Directories, files of texts and options that ``fewheads import`` and the commands behind it refuse."""

import json

import pytest
import safetensors.torch
import torch

from edge.errors import GoldenError, UsageError
from export.cli.compare import compare
from export.cli.import_ import import_
from export.cli.int8 import int8
from export.cli.reduce import reduce
from export.cli.report import report
from export.data.unlabelled import find_images, read_texts
from export.errors import CheckpointError, DataError
from export.importing.directory import read_directory
from export.importing.image_processor import read_image_processor
from export.importing.run import check_parity
from tests.support.imported_directories import (
    LABELS,
    change,
    with_tokenizer,
    write_classifier,
    write_embedder,
    write_modules,
)
from tests.support.marks import with_transformers
from tests.support.task_data import invoke


@pytest.fixture
def classifier(tmp_path):
    return write_classifier(tmp_path / "classifier")


@pytest.fixture
def embedder(tmp_path):
    return write_embedder(tmp_path / "embedder")


def test_an_embedder_with_a_dense_layer(embedder):
    found = read_directory(embedder)
    assert (found.architecture.task, found.model.width) == ("sentence-embedding", 8)
    dense = safetensors.torch.load_file(embedder / "2_Dense" / "model.safetensors")
    ids, mask = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with torch.no_grad():
        states = found.model.transformer(ids, mask)
        change(embedder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
        write_modules(embedder, "Transformer", "Pooling", "Dense", "Normalize")
        want = torch.tanh(states[:, 0] @ dense["linear.weight"].T + dense["linear.bias"])
        torch.testing.assert_close(read_directory(embedder).model(ids, mask), want / want.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "electra"}, r"model_type: got 'electra', expected one of bert, .*, vit\. Export the model"),
        ({"model_type": "gpt2"}, r"model_type: got 'gpt2', .*'fewheads pack'"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map: got code of its own, AutoModel, .*never executed"),
        ({"architectures": ["BertForNextSentencePrediction"]}, "architectures: got BertForNext.*fewheads finetune"),
        ({"architectures": None}, "architectures: got nothing, expected one class that ends with ForSequence"),
        ({"architectures": ["ViTForImageClassification"]}, "architectures: got .*, expected a class of its type"),
        ({"id2label": {**LABELS, "2": "fair"}}, "id2label: got 3 labels, expected one for each of the 2 rows"),
        ({"problem_type": "multi_label_classification"}, "problem_type: got multi_label.* of 2 outputs, expected"),
        ({"problem_type": "regression"}, "problem_type: got regression of 2 outputs, expected one label or score"),
        ({"id2label": {"0": "x" * 5000, "1": "y"}}, "id2label: got .*, expected 2 to 4096 short texts.*'fewheads pac"),
        ({"architectures": ["BertForQuestionAnswering"], "num_attention_heads": 3}, "num_attention_heads: got 3"),
    ],
)
def test_configurations_that_are_not_supported(fields, message, classifier):
    change(classifier / "config.json", **fields)
    with pytest.raises(CheckpointError, match=message):
        read_directory(classifier)


def test_files_that_are_missing(classifier):
    (classifier / "model.safetensors").rename(classifier / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"got only pytorch_model.bin, expected model.safetensors\. Load the mod"):
        read_directory(classifier)
    (classifier / "pytorch_model.bin").rename(classifier / "model.safetensors")
    weights = safetensors.torch.load_file(classifier / "model.safetensors")
    for name, what in (("pooler.dense", "the pooler before the classifier"), ("classifier", "the classifier")):
        rest = {key: tensor for key, tensor in weights.items() if not key.startswith(name)}
        safetensors.torch.save_file(rest, classifier / "model.safetensors")
        change(classifier / "config.json", id2label=LABELS if name == "pooler.dense" else {})
        with pytest.raises(CheckpointError, match=rf"tensors of {what}: got none, expected \[\d+, 32\] with a bias"):
            read_directory(classifier)
    safetensors.torch.save_file(weights, classifier / "model.safetensors")
    (classifier / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: got nothing there, expected a tokenizer\. Give"):
        read_directory(classifier)
    (classifier / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: got No such file .*save_pretrained of transformers"):
        read_directory(classifier)


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
MAX = {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}
PROMPT = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (POOLING, MAX, "max_tokens, exp"),
        (POOLING, {"pooling_mode": "lasttoken"}, "pooling_mode: got lasttoken, expected one of mean, cls"),
        (POOLING, {"pooling_mode_cls_token": True}, "got mean and cls, expected one of mean, cls"),
        (DENSE, {"activation_function": "torch.nn.Softplus"}, "got 'torch.nn.Softplus', expected one of"),
        (DENSE, {"out_features": 9}, r"safetensors tensors: got .*\[8, 32\].*, expected .*\[9, 32\]"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case: got True, expected False"),
        ("config_sentence_transformers.json", PROMPT, "default_prompt_name: got 'query', expected null"),
    ],
)
def test_modules_that_are_not_supported(file, fields, message, embedder):
    change(embedder / file, **fields)
    with pytest.raises(CheckpointError, match=message):
        read_directory(embedder)


def test_lists_of_modules_that_are_not_supported(embedder):
    write_modules(embedder, "Transformer", "Pooling", "LSTM")
    with pytest.raises(CheckpointError, match=r"modules.json: got Transformer, Pooling, LSTM, .*'fewheads pack'"):
        read_directory(embedder)
    outside = [{"path": "../other", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}]
    (embedder / "modules.json").write_text(json.dumps(outside))
    with pytest.raises(CheckpointError, match=r"modules.json: got .*other.*, expected paths inside of the directory"):
        read_directory(embedder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_std": [0.5, 0, 0.5]}, r"image_std: got \(0.5, 0.0, 0.5\), expected 3, one for each colour, above 0"),
        ({"image_mean": [0.5]}, r"image_mean: got \(0.5,\), expected 3, one for each colour"),
        ({"resample": 1}, r"resample: got 1, expected 2 \(bilinear\) or 3 \(bicubic\)"),
        ({"do_rescale": False}, "do_rescale: got False, expected true"),
        ({"size": 24}, "size: got 24, expected 16 x 16 pixels in the end"),
        ({"size": {"shortest_edge": 12}, "do_center_crop": True, "crop_size": 16}, "size: got .*12.*, expected 16 x"),
    ],
)
def test_image_processors_that_are_not_supported(fields, message, tmp_path):
    processor = {"size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    change(tmp_path / "preprocessor_config.json", **processor | fields)
    with pytest.raises(CheckpointError, match=message):
        read_image_processor(tmp_path / "preprocessor_config.json", 16, 3)


def test_options_that_do_not_fit(classifier, embedder, tmp_path):
    with pytest.raises(UsageError, match=r"--pair: got sentence-embedding in .*, expected a classifier or regression"):
        read_directory(embedder, pair=True)
    with pytest.raises(UsageError, match=r"--no-answer: got sentence-embedding in .*, expected a model that answers"):
        read_directory(embedder, no_answer=True)
    with pytest.raises(UsageError, match="--max-length: got 65, expected at most 64, the model's positions"):
        read_directory(classifier, max_length=65)
    assert read_directory(classifier, max_length=20).architecture.max_length == 20
    change(classifier / "tokenizer_config.json", model_max_length=48)
    assert read_directory(classifier).architecture.max_length == 48
    with pytest.raises(UsageError, match=r"--out .*: got the path of DIR"):
        invoke(import_, classifier, "--out", classifier)


@with_transformers
def test_an_import_that_computes_something_else_is_refused(classifier):
    with_tokenizer(classifier)
    found = read_directory(classifier)
    assert check_parity(classifier, found).largest_difference < 1e-5
    weights = safetensors.torch.load_file(classifier / "model.safetensors")
    weights["classifier.bias"] += 0.1
    safetensors.torch.save_file(weights, classifier / "model.safetensors")
    with pytest.raises(GoldenError, match=r"compared with transformers: got a difference of 0\.1, .* 'fewheads pack'"):
        check_parity(classifier, found)
    change(classifier / "tokenizer_config.json", pad_token=None)
    message = "in transformers: got ValueError: .*padding token.*, expected a directory that transformers .* reads"
    with pytest.raises(GoldenError, match=message):
        check_parity(classifier, found)


def test_texts_that_cannot_be_read(tmp_path):
    path = tmp_path / "texts.tsv"
    for data, pair, message in (
        (b"one\nand\tanother", False, r"line 2: got 2 texts in 2 columns, expected one text without a tab\. Give"),
        (b"one\tother\n\nalone", True, "line 3: got 1 texts in 1 columns, expected two texts with a tab between"),
        (b"one\tother\nleft\t", True, "line 2: got 1 texts in 2 columns, expected two texts"),
        (b"only\n", False, "texts.tsv: got 1 texts, expected two at least"),
        (b"\xff\xfe", False, "texts.tsv: got .*, expected UTF-8"),
        (b"short\n" + b"long " * 4000, False, r"line 2: got a text of 19999 bytes, expected at most 16384"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=message):
            read_texts(path, pair)
    with pytest.raises(DataError, match=r"texts .*data.csv: got a .csv file, expected lines of text"):
        read_texts(tmp_path / "data.csv", False)
    with pytest.raises(DataError, match=r"none.txt: got No such file or directory, expected a file"):
        read_texts(tmp_path / "none.txt", False)
    path.write_bytes("\ufeffone\n\ntwo\r\nthree".encode())
    assert read_texts(path, False) == (("one",), ("two",), ("three",))
    with pytest.raises(DataError, match=r"images in .*: got 0 images, expected two at least, .jpg"):
        find_images(tmp_path)


@with_transformers
def test_a_reduction_needs_data(classifier, tmp_path, sst2):
    run = tmp_path / "run"
    with_tokenizer(classifier)
    texts = tmp_path / "texts.txt"
    texts.write_text("good film\nbad plot\n")
    invoke(import_, classifier, "--out", run)
    with pytest.raises(UsageError, match="--data: got nothing, expected a file with a text in each line"):
        invoke(reduce, run, "--out", tmp_path / "small")
    with pytest.raises(UsageError, match=r"--data: got .*texts.txt, expected a run of an imported model\. Leave"):
        invoke(reduce, sst2 / "SST-2", "--data", texts, "--out", tmp_path / "small")
    invoke(import_, classifier, "--out", run, "--data", texts, "--replace")
    for command, *options in ((report,), (compare, "--out", tmp_path / "compared"), (int8,)):
        with pytest.raises(UsageError, match=r"RUN: got an imported model, expected a run of 'fewheads finetune'"):
            invoke(command, run, *options)
    texts.unlink()
    with pytest.raises(DataError, match=r"data in .*texts.txt: got nothing there, .*\. Give --data\."):
        invoke(reduce, run, "--out", tmp_path / "small")
