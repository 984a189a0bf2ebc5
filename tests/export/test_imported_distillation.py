"""Runs that were made of an imported model and are distilled from it, on texts without labels."""

import json

import numpy as np
import pytest
import torch

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from export.cli.export import export
from export.cli.finetune import finetune
from export.data.examples import Examples, split_holdout
from export.data.tokens import encode, load_tokenizer
from export.errors import DataError
from export.finetune.imported import ImportedTask, answers
from export.finetune.models import open_model
from export.finetune.objectives import TaskObjective
from export.finetune.recipe import Recipe
from export.importing.run import import_run
from export.models.heads import NO_LABEL, TokenClassifier
from export.training.runs import read_config
from tests.support.imported_directories import with_tokenizer, write_classifier, write_embedder
from tests.support.task_data import invoke, make_sentiment, make_transformer


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


def test_an_embedder_learns_the_answers_of_an_imported_one(place, tmp_path):
    data = place / "texts.txt"
    options = ("--data", data, "--epochs", 4, "--lr", 1e-2, "--seeds", 2, "--name", "taught", "--out", tmp_path)
    shown = invoke(
        finetune, "--model", place / "student", "--teacher", place / "embedder", *options, "--imitation", 0.9, "--json"
    )
    rows = held_out(place / "embedder", data)

    def cosine(run):
        ours, theirs = (answers(open_model(one).head, rows) for one in (run, place / "embedder"))
        return np.mean((ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1))

    taught = [tmp_path / f"taught-seed{seed}" for seed in (0, 1)]
    (measure,) = json.loads(shown)["metrics"]["measures"]
    assert (measure["metric"], measure["split"], measure["n"]) == ("cosine", "holdout", len(rows.targets))
    assert measure["value"] == pytest.approx(np.mean([cosine(run) for run in taught]), abs=1e-6)
    assert measure["value"] > max(0.95, cosine(place / "student") + 0.1)
    # As long as the original reads, not the default for labelled data; and the data serve later commands.
    assert read_config(taught[0]).arguments == read_config(place / "embedder").arguments
    assert read_config(taught[0]).data_dir == str(data)


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
    reader, shape = load_tokenizer(place / "embedder"), student.transformer.config
    data = task.prepare(place / "texts.txt", reader, **options, student=shape)
    objective = TaskObjective(student, data.train, Recipe(), seed=0, evaluate=float, teacher=data.teacher)
    assert objective.loss(next(objective.batches(0, 0)), 0.0) > 0
    assert sum(answered) == len(data.train.targets) + len(data.holdout.targets)


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
        ((*TWO, "--int8"), UsageError, r"--int8: got an imported run as its teacher, .*'fewheads export' also makes"),
        (("--model", "embedder", "--int8"), UsageError, r"--int8: got an imported run as its teacher"),
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
