"""Bundles of packed models that read token ids: pooling and normalisation in the graph, Hugging Face directories."""

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import openai
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import postprocessors, preprocessor
from edge.errors import UsageError
from edge.launch import running_server
from edge.runtimes.build import load_runner
from export.errors import CheckpointError
from export.importing.directory import read_directory
from tests.support import text_model
from tests.support.imported_directories import change, random_model, write_embedder, write_modules, write_traced
from tests.support.marks import with_sentence_transformers, with_transformers
from tests.support.onnx_graphs import packed, write
from tests.support.sample_requests import column
from tests.support.task_data import make_tokenizer

MAX_LENGTH = 12  # less than some texts have, and than the 64 positions of the model
TEXTS = ["the film was good", "nice", "a cat sat on the awful mat and the actor was not fine in a poor scene", ""]
BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
BERT |= {"vocab_size": 40, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of a random BERT of transformers, its tokenizer, and the file that torch's exporter writes of it."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("saved") / "bert"
    model = random_model("BertModel", BERT)
    model.save_pretrained(directory)
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "pad", "cls", "sep")}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **special)
    fast.save_pretrained(directory)
    change(directory / "tokenizer_config.json", model_max_length=MAX_LENGTH)
    model.set_attn_implementation("eager")
    ids = torch.ones(2, 5, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    axes = {name: {0: "batch", 1: "tokens"} for name in (*inputs, "last_hidden_state")}
    axes["pooler_output"] = {0: "batch"}
    (directory / "onnx").mkdir()
    write_traced(model, inputs, axes, directory / "onnx" / "model.onnx", 17)
    return directory


def with_modules(directory, *kinds, pooling):
    write_modules(directory, *kinds)
    (directory / "1_Pooling").mkdir()
    change(directory / "1_Pooling" / "config.json", embedding_dimension=32, pooling_mode=pooling)


@with_sentence_transformers
def test_a_client_of_openai_gets_what_sentence_transformers_computes(saved, tmp_path):
    from sentence_transformers import SentenceTransformer

    bundles, wanted = [], {}
    for pooling, kinds in (("mean", ["Normalize"]), ("cls", [])):
        directory = tmp_path / pooling
        shutil.copytree(saved, directory)
        with_modules(directory, "Transformer", "Pooling", *kinds, pooling=pooling)
        bundles.append(Path(packed(directory, name=pooling)["bundle"]))
        wanted[pooling] = SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    lengths = {name: np.linalg.norm(want, axis=1) for name, want in wanted.items()}
    assert np.allclose(lengths["mean"], 1)
    assert not np.allclose(lengths["cls"], 1)
    with (
        running_server(bundles, cache=tmp_path / "cache", arguments=["--http-port=0"]) as ready,
        openai.OpenAI(base_url=f"http://127.0.0.1:{ready.http_port}/v1", api_key="none", max_retries=0) as client,
    ):
        for name, want in wanted.items():
            answer = client.embeddings.create(model=name, input=TEXTS)
            np.testing.assert_allclose([one.embedding for one in answer.data], want, atol=1e-5)


@with_transformers
def test_files_of_an_embedder(saved, tmp_path):
    """Its weights are those that the embedding needs, and files in FP16 and INT8 embed about the same."""
    path = tmp_path / "model.onnx"
    shutil.copy(saved / "onnx" / "model.onnx", path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:3]))
    options = ("--tokenizer", saved, "--pooling", "mean", "--normalize", "--max-length", 16, "--fp16", "--int8")
    options += ("--inputs", tmp_path / "texts.txt")
    written = packed(path, *options, "--calibration", tmp_path / "texts.txt")
    assert (written["golden"], written["golden_rows"], written["calibration_items"]) == ("texts.txt", 3, 3)
    bundle = Bundle.open(written["bundle"])
    manifest, step = bundle.manifest, bundle.manifest.preprocess
    assert (step.max_length, step.pad_id, step.segments) == (16, 0, "token_type_ids")
    assert [(one.name, one.shape) for one in manifest.outputs] == [("sentence_embedding", (-1, 32))]
    assert manifest.space
    assert not [
        one.name for one in onnx.load_from_string(bundle.read("model.onnx")).graph.initializer if "pooler" in one.name
    ]
    for tier in manifest.tiers:
        load_runner(bundle, "onnxruntime", tmp_path / "cache", tier=tier.name).runner.close()


@pytest.fixture
def words(tmp_path):
    """A classifier of token ids that counts words, and the directory of its tokenizer."""
    (tmp_path / "tokenizer.json").write_bytes(text_model.tokenizer_json())
    return write(tmp_path / "model.onnx", text_model.model("full"))


def test_a_graph_that_has_an_embedding_beside_the_vectors_of_tokens(words, tmp_path):
    """As Optimum writes it. A text without tokens has a vector of zeros, also in FP16, and bundles' files are taken."""
    changed(words, with_both)
    (tmp_path / "texts.txt").write_text("good fine bad\npoor good\n")
    options = ("--tokenizer", tmp_path, "--max-length", 8, "--inputs", tmp_path / "texts.txt")
    bundle = Bundle.open(packed(words, *options, "--pooling", "mean", "--normalize", "--fp16")["bundle"])
    ids, mask = text_model.padded([[2, 4, 3], [5, 2], [0]])
    mask[2] = 0
    want = np.array([[1 / 5**0.5, 2 / 5**0.5], [0.5**0.5, 0.5**0.5], [0, 0]])
    for file in [artifact.file for artifact in bundle.manifest.tiers[0].artifacts]:
        graph = ReferenceEvaluator(onnx.load_from_string(bundle.read(file)))  # which, unlike a CPU's, computes in FP16
        (found,) = graph.run(None, {"input_ids": ids, "attention_mask": mask})
        np.testing.assert_allclose(found, want, atol=2e-3)
    for name in ("again", "once-more"):
        again = Bundle.open(packed(write(words, bundle.read("model.onnx")), *options, name=name)["bundle"])
        np.testing.assert_array_equal(
            again.golden.outputs["sentence_embedding"], bundle.golden.outputs["sentence_embedding"]
        )
        bundle = again


def test_a_classifier_keeps_its_logits(words, tmp_path):
    (tmp_path / "labels.txt").write_text("bad\ngood\n")
    options = ("--tokenizer", tmp_path, "--max-length", 8, "--labels", tmp_path / "labels.txt")
    bundle = Bundle.open(packed(words, *options)["bundle"])
    assert ([spec.name for spec in bundle.manifest.outputs], bundle.manifest.space) == (["logits"], None)
    label, _ = postprocessors(bundle.manifest)
    with closing(load_runner(bundle, "onnxruntime", tmp_path / "cache").runner) as runner:
        logits = runner.infer(preprocessor(bundle)(column("good fine bad", "poor")))["logits"]
    assert label.compute(logits).ravel().tolist() == [b"good", b"bad"]


def changed(path, change):
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def as_int32(model):
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    model.graph.node.insert(0, onnx.helper.make_node("Cast", ["input_ids"], ["ids"], to=onnx.TensorProto.INT64))
    model.graph.node[1].input[1] = "ids"


def of_tokens(model):
    """Give every token a vector of an unknown width."""
    model.graph.node[-2].output[0] = "last_hidden_state"
    del model.graph.node[-1], model.graph.output[:]
    sizes = ["batch", "tokens", "width"]
    vectors = onnx.helper.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT, sizes)
    model.graph.output.append(vectors)


def with_both(model):
    """Give every token a vector, and keep their sum as the embedding."""
    *_, tokens, total = model.graph.node
    tokens.output[0] = total.input[0] = "token_embeddings"
    total.output[0] = model.graph.output[0].name = "sentence_embedding"
    sizes = ["batch", "tokens", 2]
    model.graph.output.append(onnx.helper.make_tensor_value_info("token_embeddings", onnx.TensorProto.FLOAT, sizes))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (as_int32, (), r"inputs of .* for --tokenizer: got .*INT32.*, expected input_ids, attention_mask and perhaps"),
        (of_tokens, (), r"--pooling: got nothing, expected mean or cls, because 'last_hidden_state' of .* each token"),
        (of_tokens, ("--pooling", "cls"), "outputs of .* for --pooling cls: got .*, expected an output .*fixed width"),
        (
            None,
            ("--pooling", "mean"),
            r"for --pooling mean: got \{'logits': \[0, 2\]\}, expected an output",
        ),
        (None, ("--max-batch-size", 0), "--tokenizer: got --max-batch-size 0 beside it, expected a batch of texts"),
    ],
)
def test_models_that_are_no_embedders_of_texts(words, tmp_path, change, options, message):
    if change:
        changed(words, change)
    with pytest.raises(UsageError, match=message):
        packed(words, "--tokenizer", tmp_path, "--max-length", 8, *options)


def test_tokenizers_that_do_not_fit(words, tmp_path):
    with pytest.raises(UsageError, match=r"--max-length: got nothing, expected the limit of the model, which .* state"):
        packed(words, "--tokenizer", tmp_path)
    change(tmp_path / "tokenizer_config.json", model_max_length=-1)
    with pytest.raises(UsageError, match=r"--max-length: got -1, expected more than the 0 that the tokenizer adds"):
        packed(words, "--tokenizer", tmp_path)
    with pytest.raises(UsageError, match=r"--pooling: got 'mean', expected --tokenizer with it. Add --tokenizer DIR"):
        packed(words, "--pooling", "mean")
    larger = text_model.tokenizer_of([*text_model.WORDS, "more"])
    (tmp_path / "tokenizer.json").write_text(larger.to_str())
    message = r"tokenizer of 7 tokens for .*: got 6, outside of values from -6 to 5, .*, expected a row .* trained with"
    with pytest.raises(UsageError, match=message):
        packed(words, "--tokenizer", tmp_path, "--max-length", 8)
    gap = text_model.tokenizer_json().replace(b'"poor":5', b'"poor":9')
    (tmp_path / "tokenizer.json").write_bytes(gap)
    with pytest.raises(UsageError, match=r"tokenizer of 6 tokens for .*: got 9, outside of values from -6 to 5"):
        packed(words, "--tokenizer", tmp_path, "--max-length", 8)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: got .*, expected a tokenizer"):
        packed(words, "--tokenizer", tmp_path, "--max-length", 8)
    assert not (tmp_path / "models").exists()


@with_transformers
def test_a_text_longer_than_the_models_positions_is_refused(saved):
    with pytest.raises(UsageError, match=r"text of 65 tokens for .*: got .*, expected outputs .* --max-length"):
        packed(saved, "--pooling", "mean", "--max-length", 65)


def test_directories_of_hugging_face_that_have_no_fitting_file(tmp_path):
    directory = write_embedder(tmp_path / "dense")
    with pytest.raises(UsageError, match=r"MODEL .*: got a directory without them, expected onnx/model.onnx or model"):
        packed(directory)
    (directory / "onnx").mkdir()
    write(directory / "onnx" / "model.onnx", text_model.model("full"))
    with pytest.raises(UsageError, match=r"modules of .*: got 1 of type Dense, expected .*'fewheads import"):
        packed(directory)
    change(directory / "config.json", model_type="electra")
    with pytest.raises(CheckpointError, match=r"model_type: got 'electra', .* 'fewheads pack .*dense --n"):
        read_directory(directory)
    change(directory / "config.json", model_type="bert", auto_map={"AutoModel": "code.Model"})
    with pytest.raises(CheckpointError, match=r"auto_map: got code of its own, .* 'fewheads pack .*dense --n"):
        read_directory(directory)
    write_modules(directory, "Transformer")
    with pytest.raises(UsageError, match=r"MODEL .*: got a cross-encoder, .*, expected a model of single texts"):
        packed(directory)
