"""Own questions on contexts: the files that hold them, runs on them, and what their bundles answer."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from edge.bundles.bundle import Bundle
from edge.bundles.steps import WindowShape
from edge.errors import UsageError
from export.cli.export import export
from export.cli.finetune import finetune
from export.data.question_tables import is_questions, read_questions
from export.data.squad import Answer
from export.errors import DataError
from export.finetune.models import open_model
from export.finetune.own_texts import ColumnChoices, describe, own_task
from export.finetune.predictions import read_predicted
from export.finetune.questions import Answers
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import NEUTRAL, finished, invoke, make_transformer, write_model, write_rows

COLUMNS = ("question", "context", "answer")
TUNING = ("--lr", 2e-2, "--batch", 8, "--max-length", 96)


def make_questions(number):
    """Return rows on what is good; a third of the contexts has nothing."""
    random, rows = np.random.default_rng(0), []
    for row in range(number):
        words = list(random.choice(NEUTRAL[:10], size=12))
        if row % 3:
            words[int(random.integers(12))] = "good"
        rows.append(("cat sat", " ".join(words), "good" if row % 3 else ""))
    return rows


def write_lines(path, rows):
    path.write_text("".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows))


def test_files_of_questions(tmp_path):
    context = "The café sat on the mat; the mat was red."
    start = context.rindex("the mat")
    want = [(Answer(start, "the mat"),), (), (Answer(context.index("mat"), "mat"), Answer(4, "café"))]
    squad = [{"text": ["the mat"], "answer_start": [start]}, {"text": [], "answer_start": []}]
    squad.append({"text": ["mat", "café"], "answer_start": [context.index("mat"), 4]})
    entries = [
        {"id": str(row), "question": "q", "is_impossible": not one["text"]}
        | {"answers": [{"text": text, "answer_start": at} for text, at in zip(*one.values(), strict=True)]}
        for row, one in enumerate(squad)
    ]
    paragraphs = [{"context": context, "qas": entries}]
    (tmp_path / "train.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    columns = {"question": ["q"] * 3, "context": [context] * 3, "answers": squad}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    for name in ("train.json", "train.parquet"):
        assert is_questions([tmp_path / name])
        assert [one.answers for one in read_questions([tmp_path / name])] == want
    heading = ("Question", "Context", "Answer", "answer_start")
    rows = [("q", context, "the mat", start), ("q", context, "", ""), ("q", context, "mat", "")]
    write_rows(tmp_path / "train.csv", heading, rows)
    assert [one.answers for one in read_questions([tmp_path / "train.csv"])] == [*want[:2], want[2][:1]]
    write_rows(tmp_path / "label.csv", ("question", "context", "label"), [("q", context, "yes")])
    assert not is_questions([tmp_path / "label.csv"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("q", "a cat", "dog"), r"line 1 answer: got 'dog', expected a part of its context\. Give each answer as"),
        (("q", "a cat", 3), "line 1 column answer: got int, expected a text"),
        (("q", "a cat", {"text": ["cat"], "answer_start": [1]}), "a part of its context from character 1 on"),
        (("q", "a cat", {"text": ["cat"], "answer_start": ["x"]}), "a part of its context from character x on"),
        (("q", "a cat", {"text": [7], "answer_start": [1]}), "column answer: got dict, expected a text"),
        (("q", "a cat", {"texts": ["cat"]}), "column answer: got dict, expected a text"),
        (("q", "a cat", {"text": ["cat", "a"], "answer_start": [2]}), r"answer_start: got \[2\], expected a list with"),
        (("q", "a cat", 0), "column answer: got int, expected a text"),
        (("", "a cat", "cat"), "line 1 column question: got '', expected a text"),
        (("q", None, "cat"), "line 1 column context: got None, expected a text"),
    ],
)
def test_wrong_rows(tmp_path, row, message):
    write_lines(tmp_path / "faq.jsonl", [row])
    with pytest.raises(DataError, match=message):
        read_questions([tmp_path / "faq.jsonl"])


def test_contexts_are_held_out_whole_and_other_data_are_refused(tmp_path):
    rows = [row for row in make_questions(120) for _ in range(2)]
    write_lines(tmp_path / "faq.jsonl", rows)
    data = describe(tmp_path / "faq.jsonl", None, ColumnChoices())
    assert (data.spans, data.no_answer) == (True, True)
    assert [(one.name, one.in_train) for one in data.splits] == [("train", None), ("holdout", 0), ("dev", 0)]
    assert sum(one.rows for one in data.splits) == len(rows)
    write_lines(tmp_path / "dev.jsonl", [row for row in make_questions(20) if row[2]])
    with_dev = describe(tmp_path / "faq.jsonl", tmp_path / "dev.jsonl", ColumnChoices())
    assert with_dev.splits[-1].in_train > 0
    assert not describe(tmp_path / "dev.jsonl", None, ColumnChoices()).no_answer
    write_rows(tmp_path / "dev.csv", ("question", "text"), [("q", "a cat")])
    with pytest.raises(DataError, match=r"dev\.csv: got the columns question, text, expected question, context, and"):
        describe(tmp_path / "faq.jsonl", tmp_path / "dev.csv", ColumnChoices())
    write_lines(tmp_path / "dev.jsonl", [("q", "a cat", "cat"), ("q", "the cat", "cat")])
    with pytest.raises(DataError, match=r"dev\.jsonl: got 1 beside dev, expected two or more contexts"):
        describe(tmp_path / "dev.jsonl", None, ColumnChoices())
    (tmp_path / "dev.json").write_text("[]")
    with pytest.raises(DataError, match=r"expected SQuAD v1\.1 or v2\.0 JSON\. Repair the file"):
        describe(tmp_path / "dev.json", None, ColumnChoices())
    write_lines(tmp_path / "faq.jsonl", rows[:-4])
    with pytest.raises(DataError, match="236 rows with SHA-256"):
        own_task(data).splits(tmp_path)


def test_a_served_bundle_answers_as_its_run_was_measured(tmp_path):
    write_lines(tmp_path / "faq.jsonl", make_questions(180))
    write_model(tmp_path / "model", make_transformer())
    data = ("--data", tmp_path / "faq.jsonl", "--model", tmp_path / "model", "--out", tmp_path)
    remarks = finished(finetune, *data, *TUNING, "--epochs", 6, "--final").stderr
    assert "faq.jsonl: questions with answers in their contexts, some of which have none; 1" in remarks
    run = tmp_path / "faq"
    with pytest.raises(UsageError, match="a fine-tuned run without --name"):
        invoke(export, run, "--repository", tmp_path)
    invoke(export, run, "--repository", tmp_path, "--name", "faq", "--artifacts", "onnxruntime", "--no-measure")
    manifest = Bundle.open(tmp_path / "faq-1").manifest
    assert manifest.postprocess.no_answer
    assert manifest.preprocess.windows == WindowShape(question_tokens=21, stride=20)  # of 64 tokens
    assert "pipeline_tag: question-answering" in (tmp_path / "faq-1" / "README.md").read_text()
    kept = read_predicted(Answers, run, "dev")
    assert kept.exact_match.mean() > 0.8
    assert set(kept.texts.tolist()) >= {"good", ""}
    every = {one.id: one for one in own_task(open_model(run).config.own_data).splits(tmp_path)[1]["dev"]}
    dev = [every[name] for name in kept.questions.tolist()]
    named = {"question": column(*(one.question for one in dev)), "context": column(*(one.context for one in dev))}
    with served_bundles([tmp_path / "faq-1"], tmp_path / "cache") as ask:
        batches = [{name: rows[i : i + 16] for name, rows in named.items()} for i in range(0, len(dev), 16)]
        found = [ask("faq", batch, tier="x1") for batch in batches]
    answer = {name: np.concatenate([one[name] for one in found])[:, 0].tolist() for name in found[0]}
    assert [text.decode() for text in answer["answer"]] == kept.texts.tolist()
    for one, text, begin, end in zip(dev, kept.texts.tolist(), answer["start"], answer["end"], strict=True):
        assert one.context[begin:end] == text
