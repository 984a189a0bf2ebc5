"""Unlabelled text beside a training set."""

import msgspec
import numpy as np
import pytest

from edge.errors import UsageError
from export.cli.finetune import finetune
from export.data.examples import Examples
from export.errors import DataError
from export.finetune import transfer
from export.finetune.objectives import Teacher
from export.finetune.recipe import Distillation, FinetuningRecipe
from export.finetune.transfer import TransferObjective, read_transfer
from export.training.runs import read_config
from export.training.trainer import train as training
from tests.support.task_data import Seen, accuracy_on, encoded, invoke, make_classifier, make_sentiment, same

RECIPE = FinetuningRecipe(
    epochs=2, batch_size=32, peak_learning_rate=2e-2, distillation=Distillation(imitation=0.0, transfer_share=0.75)
)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"text {number}\n" for number in range(40)))
    return path


def test_pairs_are_similar(texts, monkeypatch):
    monkeypatch.setattr(transfer, "_BLOCK", 9)  # the last text has no neighbours
    animals = [f"the {colour} {one} sleeps" for one in ("cat", "dog", "cow") for colour in ("old", "red", "shy")]
    texts.write_text("\n".join([*animals, "alone"]))
    rows = read_transfer(texts, True, []).texts
    assert [one for one, _ in rows] == [*animals, "alone"]
    for number, (one, other) in enumerate(rows[:-1]):
        assert one != other
        if number % 2:
            assert len(set(one.split()) & set(other.split())) >= 2
        else:
            assert other in animals
            assert len(set(one.split()) & set(other.split())) == 3
    assert rows == read_transfer(texts, True, []).texts


def test_nothing_measured_is_learnt(texts):
    dev = Examples((("a", "text 7"), ("b", "c")), np.zeros(2))
    assert read_transfer(texts, False, []).texts[3] == ("text 3",)
    with pytest.raises(DataError, match=r"got 1 of 40 with text of the hold-out or dev, such as 'text 7'.*Remove"):
        read_transfer(texts, False, [dev])
    dev = Examples((("The cat sat on a mat.",),), np.zeros(1))
    texts.write_text("It rains. The cat sat on a mat!\nThe mat is red.\n")
    with pytest.raises(DataError, match=r"got 1 of 2 with text of the hold-out or dev, such as 'It rains\."):
        read_transfer(texts, False, [dev])


def test_short_texts_are_drawn_without_those_that_are_measured(texts):
    lines = [f"the cat sat on mat number {number}" for number in range(40)]
    texts.write_text("\n".join(["too few words", *lines, " ".join(["too many words"] * 7)]))
    dev = Examples(((lines[1], "b"),), np.zeros(1))
    assert read_transfer(texts, False, [dev], most=3).texts == ((lines[0],), (lines[2],), (lines[3],))


def test_texts_that_are_all_too_long_are_refused(texts):
    texts.write_text("\n".join(f"{number} " + "many words " * 15 for number in range(3)))
    with pytest.raises(
        DataError, match=r"got 0 lines of 4 to 20 words, expected two at least\. Give a sentence in each"
    ):
        read_transfer(texts, False, [], most=3)


def test_answers_that_were_computed_before_give_the_same_loss():
    rows, further, teacher = encoded(make_sentiment(64)), encoded(make_sentiment(80, seed=5)), make_classifier()
    losses = []
    for known in (None, Teacher(teacher, further, range(2))):
        objective = TransferObjective(
            *(make_classifier(seed=1), rows, RECIPE),
            seed=0, evaluate=float, teacher=teacher, transfer=further, transfer_teacher=known,
        )  # fmt: skip
        losses.append(objective.loss(next(objective.batches(0, 0)), 0.0).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # states are kept in bfloat16


def test_answers_to_unlabelled_text_outweigh_wrong_labels_and_a_training_resumes_to_the_same_bits(holdout, tmp_path):
    signal = encoded(make_sentiment(320))
    teacher = make_classifier()
    wrong = msgspec.structs.replace(signal, targets=1 - signal.targets)
    tuned = FinetuningRecipe(epochs=3, batch_size=32, peak_learning_rate=2e-2)

    def tune(model, rows, recipe, teacher=None, transfer=None, **options):
        common = {"seed": 0, "evaluate": accuracy_on(model, holdout), "teacher": teacher}
        extra = {"transfer": transfer} if transfer else {}
        objective = TransferObjective if transfer else TransferObjective.__base__
        training(objective(model, rows, recipe, **common, **extra), recipe, seed=0, **options)
        return model

    tune(teacher, signal, tuned)
    further = encoded(make_sentiment(200, seed=5))
    scores = [accuracy_on(tune(make_classifier(seed=1), wrong, RECIPE, teacher), holdout)()]
    student = tune(make_classifier(seed=1), wrong, RECIPE, teacher, further)
    scores.append(accuracy_on(student, holdout)())
    assert scores[0] < 0.5
    assert scores[1] > 0.8
    state = tmp_path / "state"
    options = {"state": state, "save_every": 3, "observer": Seen(14)}
    with pytest.raises(KeyboardInterrupt):
        tune(make_classifier(seed=1), wrong, RECIPE, teacher, further, **options)
    assert same(tune(make_classifier(seed=1), wrong, RECIPE, teacher, further, state=state), student)


def test_the_command_records_the_text_and_refuses_it_where_it_does_nothing(place, texts, tmp_path):
    start = ("SST-2", "--model", place / "SST-2", "--data-dir", place, "--out", tmp_path / "runs")
    quick = ("--epochs", 1, "--limit", 32, "--max-length", 32, "--no-report")
    teacher, transfer = ("--teacher", place / "SST-2"), ("--transfer", texts)
    for arguments, message in (
        (transfer, "--transfer: got no --teacher, expected a task of texts with labels, and --teacher"),
        ((*teacher, "--transfer-share", 0.5), r"--transfer-share: got 0\.5, expected --transfer beside it"),
        (("--transfer-share", 0.5), r"--transfer-share: got 0\.5, expected a run as --teacher beside it"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(finetune, *start, *quick, *arguments)
    invoke(finetune, *start, *quick, *teacher, *transfer)
    assert "SST-2 and text of texts.txt (SHA-256 " in read_config(tmp_path / "runs" / "SST-2").provenance.data
