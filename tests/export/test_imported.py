"""Fine-tuned directories that the package transformers saves, from their import to an answer of the server."""

import io
import itertools
import json
import re
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.errors import UsageError
from edge.runtimes.build import load_runner
from export.cli.export import export
from export.cli.import_ import import_
from export.cli.reduce import reduce
from export.data.examples import split_holdout
from export.data.tokens import encode, load_tokenizer
from export.errors import DataError
from export.finetune.imported import ImportedTask, answers
from export.finetune.models import open_model
from export.importing.directory import read_directory
from export.importing.image_processor import sample_images
from tests.support.imported_directories import random_model, with_tokenizer, write_embedder
from tests.support.marks import with_sentence_transformers, with_transformers
from tests.support.sample_requests import column
from tests.support.server_processes import served
from tests.support.stock_client import served_bundles
from tests.support.task_data import invoke, make_sentiment, make_tokenizer

pytestmark = with_transformers

ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = ENCODER | {"vocab_size": 40, "max_position_embeddings": 66}
DISTILBERT = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "vocab_size": 40, "max_position_embeddings": 64}
NAMES = {0: "O", 1: "PERSON", 2: "PLACE"}
#: Name to the class of transformers, its configuration, and options of the import.
MODELS = {
    "classes": (
        "BertForSequenceClassification",
        TEXT | {"num_hidden_layers": 2, "id2label": {0: "bad", 1: "good"}},
        (),
    ),
    "pairs": ("RobertaForSequenceClassification", TEXT | {"type_vocab_size": 1, "num_labels": 1}, ("--pair",)),
    "distances": ("MPNetForSequenceClassification", TEXT | {"num_labels": 3}, ()),
    "distilled": ("DistilBertForSequenceClassification", DISTILBERT | {"num_labels": 3}, ()),
    "tokens": ("BertForTokenClassification", TEXT | {"id2label": NAMES}, ()),
    "questions": ("BertForQuestionAnswering", TEXT, ("--no-answer",)),
    "multilingual": ("XLMRobertaForTokenClassification", TEXT | {"type_vocab_size": 1, "id2label": NAMES}, ()),
    "pictures": (
        "ViTForImageClassification",
        ENCODER | {"image_size": 16, "patch_size": 4, "num_channels": 3, "id2label": NAMES},
        (),
    ),
}
TEXTS = [text for text, _ in make_sentiment(120)]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A file of texts, and one of pairs."""
    root = tmp_path_factory.mktemp("texts")
    (root / "texts.txt").write_text("\n".join(TEXTS))
    (root / "pairs.tsv").write_text("\n".join(f"{one}\t{other}" for one, other in itertools.pairwise(TEXTS)))
    return root


def write_random(directory, kind, fields):
    """Save a random model of a class of transformers, with its tokenizer or image processor."""
    import transformers

    random_model(kind, fields).save_pretrained(directory)
    if "image_size" in fields:
        size = {"height": 16, "width": 16}
        transformers.ViTImageProcessorPil(size=size, image_mean=[0.4, 0.5, 0.6]).save_pretrained(directory)
        return
    # RoBERTa and MPNet count positions by the padding's number, 1.
    first = ("[UNK]", "[PAD]") if "Roberta" in kind or "MPNet" in kind else ("[PAD]", "[UNK]")
    tokenizer = make_tokenizer((*first, "[CLS]", "[SEP]"))
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    reads = ["input_ids", "attention_mask", *(["token_type_ids"] if kind.startswith("Bert") else [])]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=reads, **special)
    fast.save_pretrained(directory)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a function that saves a random model of :data:`MODELS` once, with its tokenizer or image processor."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def save(name):
        kind, fields, _ = MODELS[name]
        write_random(root / name, kind, fields)
        return root / name

    return save


@pytest.fixture(scope="session")
def imported(saved, texts, tmp_path_factory):
    """Return a function that imports a model of :data:`MODELS` once, and returns its run and what was printed."""
    root = tmp_path_factory.mktemp("imported")

    @cache
    def run(name):
        shown = invoke(import_, saved(name), "--out", root / name, *MODELS[name][2], "--json")
        return root / name, json.loads(shown)

    return run


@pytest.mark.parametrize("name", MODELS)
def test_an_import_computes_what_transformers_computes(name, imported):
    run, shown = imported(name)
    assert shown["parity"]["library"].startswith("transformers ")
    assert shown["parity"]["largest_difference"] < 1e-4
    found = open_model(run)
    assert (found.architecture.task, list(found.architecture.labels)) == (shown["task"], shown["labels"])


def test_images_have_no_length(saved):
    with pytest.raises(UsageError, match=r"--max-length: got 12, expected a model of texts\. Leave it out"):
        read_directory(saved("pictures"), max_length=12)


def test_an_export_names_the_image_that_it_cannot_read(imported, tmp_path):
    run, images = imported("pictures")[0], tmp_path / "images"
    images.mkdir()
    for number, image in enumerate(sample_images(open_model(run).architecture.image)):
        (images / f"{number}.png").write_bytes(image)
    (images / "3.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"image .*3.png: got bytes that begin with .*, expected JPEG or PNG"):
        invoke(export, run, "--repository", tmp_path / "bundles", "--name", "pictures", "--data", images)
    assert not (tmp_path / "bundles").exists()


def test_imported_runs_cannot_be_a_cascade(imported, tmp_path):
    run, tiers = imported("pictures")[0], ("--tier-name", "a", "--tier-name", "b")
    with pytest.raises(UsageError, match=r"--cascade: got 0\.3, .* Give fine-tuned runs of one task with classes"):
        invoke(export, run, run, "--repository", tmp_path, "--name", "pictures", *tiers, "--cascade", 0.3)


@pytest.fixture(scope="session")
def bundles(imported, texts, tmp_path_factory):
    """Return a function that exports a model of :data:`MODELS` once; some with texts of ours, some with given ones."""
    root = tmp_path_factory.mktemp("bundles")

    @cache
    def make(name):
        options = ("--artifacts", "onnxruntime") if name != "tokens" else ("--data", texts / "texts.txt")
        options += ("--data", texts / "pairs.tsv") if name == "pairs" else ()
        invoke(export, imported(name)[0], "--repository", root, "--name", name, *options)
        return root / f"{name}-1"

    return make


SENTENCES = ["the film was good", "a cat sat on the awful mat", "nice"]
INPUTS = {"pairs": ("text", "text_pair"), "questions": ("question", "context")}


def columns_of(name):
    """Return the texts for a model by the names of its inputs."""
    return dict(zip(INPUTS.get(name, ("text",)), (SENTENCES, SENTENCES[::-1]), strict=False))


def tokens_of(directory, columns):
    """Return what transformers reads of texts, with the characters of each token."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return tokenizer(*columns.values(), padding=True, return_tensors="pt", return_offsets_mapping=True)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A directory of sentence-transformers, and its bundle."""
    root = tmp_path_factory.mktemp("embedder")
    with_tokenizer(write_embedder(root / "directory"))
    invoke(import_, root / "directory", "--out", root / "run")
    invoke(export, root / "run", "--repository", root, "--name", "embeddings", "--artifacts", "onnxruntime")
    return root / "directory", root / "embeddings-1"


def test_a_stock_client_gets_what_transformers_computes(imported, saved, bundles, embedder, tmp_path):
    import transformers

    directory, bundle = embedder
    with served_bundles([*map(bundles, MODELS), bundle], tmp_path / "cache") as ask, torch.no_grad():
        for name, (kind, *_) in MODELS.items():
            model, offsets = getattr(transformers, kind).from_pretrained(saved(name)).eval(), None
            if name == "pictures":
                images = sample_images(open_model(imported(name)[0]).architecture.image)[:3]
                found = ask(name, {"image": column(*images)})
                processor = transformers.ViTImageProcessorPil.from_pretrained(saved(name))
                read = processor([Image.open(io.BytesIO(one)) for one in images], return_tensors="pt")
            else:
                columns = columns_of(name)
                outputs = ("start_logits", "end_logits", "offsets") if name == "questions" else ()
                found = ask(name, {key: column(*texts) for key, texts in columns.items()}, outputs)
                read = tokens_of(saved(name), columns)
                offsets, mask = read.pop("offset_mapping"), read["attention_mask"].bool()
            wanted = {key: value for key, value in model(**read).items() if key.endswith("logits")}
            for output, want in wanted.items():
                rows = [slice(None)] * len(want) if "offsets" not in found else list(mask)
                for got, logits, row in zip(found[output], want, rows, strict=True):
                    np.testing.assert_allclose(got[row], logits[row], atol=1e-4, err_msg=name)
            if "offsets" in found:
                assert found["offsets"].tolist() == offsets.tolist()
            for output in {"label", "labels"} & found.keys():
                want = wanted["logits"].argmax(dim=-1).reshape(found[output].shape)
                names = np.vectorize(lambda number, of=model.config.id2label: of[number].encode())(want)
                seen = mask.numpy() if output == "labels" else np.full(want.shape, True)
                assert found[output][seen].tolist() == names[seen].tolist()
            if name == "pairs":
                np.testing.assert_array_equal(found["score"], found["logits"])
        found = ask("embeddings", {"text": column(*SENTENCES)})["embedding"]
        read = tokens_of(directory, {"text": SENTENCES})
        states = transformers.BertModel.from_pretrained(directory)(
            input_ids=read["input_ids"], attention_mask=read["attention_mask"]
        ).last_hidden_state
        mask, dense = read["attention_mask"][:, :, None], load_file(directory / "2_Dense" / "model.safetensors")
        means = (states * mask).sum(dim=1) / mask.sum(dim=1)
        want = torch.tanh(means @ dense["linear.weight"].T + dense["linear.bias"])
        np.testing.assert_allclose(found, want, atol=1e-4)


def test_a_pretrained_encoder_becomes_the_mean_of_its_last_states(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_random(tmp_path / "encoder", "BertForMaskedLM", TEXT)
    shown = json.loads(invoke(import_, tmp_path / "encoder", "--out", tmp_path / "run", "--json"))
    assert (shown["task"], shown["width"]) == ("sentence-embedding", 32)
    read = tokens_of(tmp_path / "encoder", {"text": SENTENCES})
    inputs, attended = read["input_ids"], read["attention_mask"]
    encoder = transformers.BertModel.from_pretrained(tmp_path / "encoder").eval()
    with torch.no_grad():
        states = encoder(input_ids=inputs, attention_mask=attended).last_hidden_state * attended[:, :, None]
        found = open_model(tmp_path / "run").head(inputs, attended)
    torch.testing.assert_close(found, states.sum(dim=1) / attended.sum(dim=1, keepdim=True), atol=1e-5, rtol=1e-4)


@with_sentence_transformers
def test_a_stock_client_gets_the_cosines_of_sentence_transformers(tmp_path):
    from sentence_transformers import SentenceTransformer

    models = {}
    for name, kind in (("bert", "BertModel"), ("mpnet", "MPNetModel")):
        write_random(tmp_path / f"{name}-transformer", kind, TEXT)
        # A directory without modules.json gets a mean.
        models[name] = SentenceTransformer(str(tmp_path / f"{name}-transformer"), device="cpu")
        models[name].save_pretrained(str(tmp_path / name))
        options = ("--max-length", 12, "--json")  # less than its texts have
        shown = json.loads(invoke(import_, tmp_path / name, "--out", tmp_path / "runs" / name, *options))
        assert shown["parity"]["library"].startswith("sentence-transformers ")
        assert shown["parity"]["largest_difference"] < 1e-5
        invoke(export, tmp_path / "runs" / name, "--repository", tmp_path, "--name", name, "--artifacts", "onnxruntime")
    with served_bundles([tmp_path / f"{name}-1" for name in models], tmp_path / "cache") as ask:
        for name, model in models.items():
            ours = ask(name, {"text": column(*SENTENCES)})["embedding"]
            ours = ours / np.linalg.norm(ours, axis=1, keepdims=True)
            theirs = model.similarity(*2 * [model.encode(SENTENCES)])
            np.testing.assert_allclose(ours @ ours.T, theirs, atol=1e-5, rtol=0)


def test_the_agreement_of_int8_files_is_in_the_manifest(imported, bundles, texts, tmp_path):
    run, bundle = imported("tokens")[0], Bundle.open(bundles("tokens"))
    original = open_model(run)
    items = ImportedTask(original.architecture, original.head).items(texts / "texts.txt")
    held_out = [text for (text,) in split_holdout(items)[1].texts]
    runner = load_runner(bundle, "onnxruntime", tmp_path, tier="x1-int8").runner
    step, shares = preprocessor(bundle), []
    for text in held_out:
        feeds = step(np.array([[text.encode()]], np.object_))
        ids, mask = (torch.from_numpy(feeds[name]) for name in ("input_ids", "attention_mask"))
        with torch.no_grad():
            wanted = original.head(ids, mask).argmax(dim=2).numpy()
        equal = runner.infer(feeds)["logits"].argmax(axis=2) == wanted
        shares.append(equal[:, 1:-1].mean())  # without [CLS] and [SEP]
    runner.close()
    measures = {one.split: one for one in bundle.manifest.measures}
    assert "holdout, tier x1-int8 on tensorrt" in measures
    found = measures["holdout, tier x1-int8 on onnxruntime"]
    assert (found.metric, found.n) == ("agreement", len(held_out))
    assert found.value == pytest.approx(np.mean(shares))
    (pairs,) = Bundle.open(bundles("pairs")).manifest.measures
    assert (pairs.metric, pairs.split) == ("pearson", "holdout, tier x1-int8 on onnxruntime")
    assert 0.9 < pairs.value <= 1


def test_the_log_has_the_difference_of_each_tier(bundles, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tokens").symlink_to(bundles("tokens"))
    with served(tmp_path / "models", "--cache", tmp_path / "cache") as server:
        server.process.terminate()
        _, log = server.end()
    full, int8 = re.findall(r"its golden outputs differ at most by (\S+) \(x1\), (\S+) \(x1-int8\)", log)[0]
    assert float(full) < 1e-3 < float(int8)


def test_a_reduced_run_is_measured_by_its_agreement_with_the_original(imported, texts, tmp_path):
    run, small = imported("classes")[0], tmp_path / "half"
    options = ("--target-speedup", 1.3, "--tokens", 16, "--calibration", 64, "--out", small, "--json")
    (measure,) = json.loads(invoke(reduce, run, "--data", texts / "texts.txt", *options))["metrics"]["measures"]
    assert (measure["metric"], measure["split"]) == ("agreement", "holdout")
    original, smaller = open_model(run), open_model(small)
    assert smaller.transformer.config.layers != original.transformer.config.layers
    _, holdout = split_holdout(ImportedTask(original.architecture, original.head).items(texts / "texts.txt"))
    rows = encode(load_tokenizer(run), holdout, 64)
    ours, theirs = (answers(one.head, rows) for one in (smaller, original))
    assert measure["value"] == pytest.approx((ours == theirs).mean())
    assert measure["n"] == len(holdout.texts)
    # The data that the reduction recorded serve the export.
    names = ("--name", "both", "--tier-name", "x1", "--tier-name", "half", "--artifacts", "onnxruntime")
    invoke(export, run, small, "--repository", tmp_path, *names)
    manifest = Bundle.open(tmp_path / "both-1").manifest
    assert [tier.name for tier in manifest.tiers] == ["x1", "x1-int8", "half", "half-int8"]
    assert manifest.postprocess.labels == ("bad", "good")
    tiers = ("x1-int8 on onnxruntime", "half", "half-int8 on onnxruntime")
    assert [one.split for one in manifest.measures] == [f"holdout, tier {tier}" for tier in tiers]
