"""Runs that were made of an imported model and are distilled from it, on texts without labels."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import tritonclient.http as triton

from edge.bundles.bundle import Bundle
from edge.cli.info import info
from edge.client import Client
from edge.errors import UsageError
from edge.launch import running_server
from export.cli.export import export
from export.cli.finetune import finetune
from export.data.examples import Examples, split_holdout
from export.data.tokens import encode, load_tokenizer
from export.errors import DataError
from export.finetune.imported import ImportedTask, answers
from export.finetune.models import open_model, space_of
from export.finetune.objectives import TaskObjective
from export.finetune.recipe import FinetuningRecipe
from export.finetune.run import task_of
from export.importing.run import import_run
from export.models.heads import NO_LABEL, TokenClassifier
from export.models.transformer import Transformer
from export.training.runs import read_config
from tests.support.imported_directories import change, with_tokenizer, write_classifier, write_embedder
from tests.support.task_data import finished, invoke, make_sentiment, make_transformer, write_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with texts, and imported runs: two embedders and two classifiers of tokens with other weights."""
    root = tmp_path_factory.mktemp("distillation")
    (root / "texts.txt").write_text("\n".join(text for text, _ in make_sentiment(400)))
    directories = {
        "embedder": write_embedder(root / "directory"),
        "student": write_embedder(root / "other", seed=1),
        "classifier": write_classifier(root / "third"),
        "tokens": write_classifier(root / "fourth", per_token=True),
        "other tokens": write_classifier(root / "fifth", per_token=True, seed=2),
    }
    for name, directory in directories.items():
        with_tokenizer(directory)
        import_run(directory, root / name, max_length=24)
    return root


def held_out(run, data):
    """Return the hold-out of texts as rows, encoded for a run."""
    found = open_model(run)
    _, holdout = split_holdout(ImportedTask(found.architecture, found.head).items(data))
    return encode(load_tokenizer(run), holdout, found.architecture.max_length)


@pytest.fixture(scope="module")
def taught(place):
    """Two runs that learnt the answers of the embedder, and what their training printed."""
    options = ("--data", place / "texts.txt", "--epochs", 4, "--lr", 1e-2, "--seeds", 2, "--name", "taught")
    models = ("--model", place / "student", "--teacher", place / "embedder", "--imitation", 0.9)
    shown = invoke(finetune, *models, *options, "--out", place, "--json")
    return [place / f"taught-seed{seed}" for seed in (0, 1)], json.loads(shown)


def test_an_embedder_learns_the_answers_of_an_imported_one(place, taught):
    data, (runs, shown) = place / "texts.txt", taught
    rows = held_out(place / "embedder", data)

    def cosine(run):
        ours, theirs = (answers(open_model(one).head, rows) for one in (run, place / "embedder"))
        return np.mean((ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1))

    (measure,) = shown["metrics"]["measures"]
    assert (measure["metric"], measure["split"], measure["n"]) == ("cosine", "holdout", len(rows.targets))
    assert measure["value"] == pytest.approx(np.mean([cosine(run) for run in runs]), abs=1e-6)
    assert measure["value"] > max(0.95, cosine(place / "student") + 0.1)
    # As long as the original reads, not the default for labelled data; and the data serve later commands.
    assert read_config(runs[0]).arguments == read_config(place / "embedder").arguments
    assert read_config(runs[0]).data_dir == str(data)


def without_space(run, copy):
    """Return a copy of a run, as earlier versions wrote it."""
    shutil.copytree(run, copy)
    change(copy / "config.json", space=None)
    return copy


def test_runs_know_the_space_of_their_embeddings(place, taught, tmp_path):
    original = read_config(place / "embedder").space
    assert re.fullmatch("[0-9a-f]{16}", original)
    assert (
        [read_config(run).space for run in taught[0]]
        == [original, original]
        != [read_config(place / "student").space] * 2
    )
    older = without_space(place / "embedder", tmp_path / "older")
    assert space_of(open_model(older)) == original
    assert space_of(open_model(without_space(taught[0][0], tmp_path / "trained"))) is None  # nobody knows whose answers
    assert task_of(open_model(older), older).space == original  # which a reduction and a distillation record
    # What is trained on labels answers as nobody does.
    write_rows(tmp_path / "labels.csv", ("text", "label"), make_sentiment(60))
    tuning = ("--data", tmp_path / "labels.csv", "--epochs", 1, "--max-length", 16, "--no-report")
    invoke(finetune, *tuning, "--model", place / "embedder", "--name", "labels", "--out", tmp_path)
    assert read_config(tmp_path / "labels").space is read_config(place / "classifier").space is None


@pytest.fixture(scope="module")
def tiers(place, taught):
    """A bundle of the embedder, as earlier versions wrote it, and of one that learnt its answers."""
    runs = (without_space(place / "embedder", place / "older"), taught[0][0])
    names = ("--name", "minilm", "--tier-name", "full", "--tier-name", "half")
    names = (*names, "--artifacts", "onnxruntime", "--no-measure")
    shown = invoke(export, *runs, *names, "--repository", place, "--json")
    assert not json.loads(shown)[0]["without_space"]
    return place / "minilm-1"


def test_a_small_tier_embeds_queries_for_documents_of_the_full_one(tiers, place, taught):
    space = read_config(place / "embedder").space
    assert {tier.name: tier.space for tier in Bundle.open(tiers).manifest.tiers} == dict.fromkeys(
        ("full", "full-int8", "half", "half-int8"), space
    )
    assert f"space {space}: the embeddings of full, full-int8, half, half-int8 can be compared" in invoke(info, tiers)
    page = (Path(__file__).parents[2] / "edge" / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(import numpy.+?)^```$", page, re.MULTILINE | re.DOTALL)
    documents, query = ("a cat sat on the mat", "the plot was awful and poor"), "is the cat on a mat"
    for theirs, ours in zip(re.findall(r'"([A-Z][^"]+[.?])"', program), (*documents, query), strict=True):
        program = program.replace(theirs, ours)
    with running_server([tiers], target="onnxruntime", cache=place / "cache", arguments=["--http-port=0"]) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        program = program.replace("127.0.0.1:8001", url)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        with Client(url) as client:
            assert client.space("minilm") == space
        with triton.InferenceServerClient(f"127.0.0.1:{ready.http_port}") as over_http:
            parameters = over_http.get_model_config("minilm")["parameters"]
    assert parameters["tiers"] == {"string_value": "full, full-int8, half, half-int8"}
    assert parameters["space"] == {"string_value": space}
    assert done.returncode == 0, done.stderr
    texts = Examples(tuple((text,) for text in (*documents, query)), np.zeros(3, np.int64))
    rows = encode(load_tokenizer(place / "embedder"), texts, 24)
    full, half = (answers(open_model(run).head, rows) for run in (place / "embedder", taught[0][0]))
    shown = [float(number) for number in re.findall(r"-?\d+\.\d+", done.stdout)]
    np.testing.assert_allclose(shown, full[:2] @ half[2], rtol=1e-4)
    assert abs(full[:2] @ full[2] - full[:2] @ half[2]).min() > 1e-3  # so it was the small one


def test_tiers_share_their_space(place, taught, tmp_path):
    names = ("--name", "both", "--tier-name", "one", "--tier-name", "other", "--repository", tmp_path, "--no-measure")
    names = (*names, "--artifacts", "onnxruntime")
    ours, theirs = (read_config(place / run).space for run in ("embedder", "student"))
    message = f"student: got '{theirs}', expected {ours}, that of .*embedder, because a policy may .* bundle of its own"
    with pytest.raises(UsageError, match=message):
        invoke(export, place / "embedder", place / "student", *names)
    unknown = without_space(taught[0][0], tmp_path / "unknown")
    done = finished(export, place / "embedder", unknown, *names)
    assert "both-1: nothing says that the embeddings of other, other-int8 can be compared with those of" in done.stderr
    assert [tier.space for tier in Bundle.open(tmp_path / "both-1").manifest.tiers] == [ours, ours, None, None]


def test_a_token_classifier_learns_and_becomes_a_tier_beside_its_teacher(place, tmp_path):
    teacher, student, data = place / "tokens", place / "other tokens", place / "texts.txt"
    tuning = ("--epochs", 6, "--lr", 1e-2, "--name", "taught", "--out", tmp_path)
    invoke(finetune, "--model", student, "--teacher", teacher, "--data", data, *tuning)
    rows = held_out(teacher, data)
    theirs = answers(open_model(teacher).head, rows)
    words = theirs != NO_LABEL
    agreements = [
        (answers(open_model(run).head, rows) == theirs)[words].mean() for run in (student, tmp_path / "taught")
    ]
    assert agreements[0] < 0.8
    assert agreements[1] > 0.95
    names = ("--tier-name", "original", "--tier-name", "taught")
    options = ("--name", "names", *names, "--data", data, "--no-measure")
    invoke(export, teacher, tmp_path / "taught", "--repository", tmp_path, *options)
    (measure,) = Bundle.open(tmp_path / "names-1").manifest.measures
    assert (measure.metric, measure.split) == ("agreement", "holdout, tier taught")


def test_labels_of_special_tokens_do_not_count(place):
    found, reader = open_model(place / "tokens"), load_tokenizer(place / "tokens")
    task = ImportedTask(found.architecture, found.head)
    texts = Examples((("a cat",), ("",)), np.zeros(2, np.int64))
    rows = task.answered(texts, place, reader, 24)
    begin, *words, end = rows.targets[0]
    assert (begin, end, NO_LABEL in words) == (NO_LABEL, NO_LABEL, False)
    assert task.predict(open_model(place / "other tokens").head, rows).values[1] == 1  # nothing to disagree on


def test_the_original_answers_each_text_once_for_labels_and_imitation(place):
    found, student = open_model(place / "embedder"), open_model(place / "student").head
    answered = []
    found.head.register_forward_hook(lambda module, inputs, outputs: answered.append(len(inputs[0])))
    task, options = ImportedTask(found.architecture, found.head), {"max_length": 24, "limit": None}
    options["layers"] = task.imitated_by(place / "student")
    data = task.prepare(place / "texts.txt", load_tokenizer(place / "embedder"), **options)
    objective = TaskObjective(student, data.train, FinetuningRecipe(), seed=0, evaluate=float, teacher=data.teacher)
    assert objective.loss(next(objective.batches(0, 0)), 0.0) > 0
    assert sum(answered) == len(data.train.targets) + len(data.holdout.targets)


def test_layers_are_imitated_at_their_share_of_the_depth_and_those_of_another_width_refused(place, tmp_path):
    found = open_model(place / "embedder")
    shape = found.transformer.config
    deep = msgspec.structs.replace(shape, layers=shape.layers * 4)
    task = ImportedTask(found.architecture, found.architecture.create(Transformer(deep)))
    assert task.imitated_by(place / "student") == [3]
    narrow = (place / "student" / "config.json").read_text().replace('"dim": 32', '"dim": 24')
    (tmp_path / "config.json").write_text(narrow)
    with pytest.raises(UsageError, match=r"--hidden: got a width of 24, and 32 of the teacher, expected hidden states"):
        task.imitated_by(tmp_path)


def test_the_imitation_of_labels_of_tokens_is_a_mean_over_tokens():
    torch.manual_seed(0)
    model = TokenClassifier(make_transformer(layers=1), 3)
    ours, theirs = torch.randn(2, 4, 5, 3)
    loss, longer = (model.imitation(*(x.repeat(1, n, 1) for x in (ours, theirs)), 2.0) for n in (1, 10))
    assert float(longer) == pytest.approx(float(loss), rel=1e-5)


TWO = ("--model", "student", "--teacher", "embedder")
OTHER_OUTPUTS = (
    "student: got sentence-embedding, 0 labels, at most 24 tokens, expected the inputs and outputs of the teach"
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ((*TWO, "--label", "stars"), UsageError, r"--label: got 'stars', expected nothing beside an imported run as"),
        ((*TWO, "--dev", "texts.txt"), UsageError, r"--dev: got .*; to train on labels of your own, leave --teacher"),
        ((*TWO, "--classification"), UsageError, r"--classification: got this option, expected nothing beside"),
        ((*TWO, "--max-length", 25), UsageError, r"--max-length: got 25, expected 24 at most, the tokens that the imp"),
        (("--model", "student", "--teacher", "classifier"), UsageError, OTHER_OUTPUTS),
        (("--model", "directory", "--teacher", "embedder"), UsageError, r"directory: got another model, expected an i"),
        (("--teacher", "embedder"), UsageError, r"--model: got nothing, expected a run\. Give --model alone, an imp"),
        (("--model", "student", "--teacher", "directory"), DataError, r"txt: got .*Texts without labels need a run of"),
    ],
)
def test_a_distillation_from_an_imported_run_refuses(options, error, message, place, tmp_path):
    found = [place / one if (place / str(one)).exists() else one for one in options]
    with pytest.raises(error, match=message):
        invoke(finetune, *found, "--data", place / "texts.txt", "--name", "none", "--out", tmp_path)
    assert not any(tmp_path.iterdir())
