import copy
import math

import numpy as np
import pytest
import scipy.stats
import torch
from msgspec.structs import replace

from edge.bench.layer_latencies import PREDICTION
from edge.errors import UsageError
from export.data.images import Images, vit
from export.data.tokens import Encoded
from export.errors import CheckpointError, TrainingError
from export.finetune.objectives import TaskObjective, Teacher, corresponding_layers, hidden_loss, outputs_of
from export.finetune.predictions import (
    METRICS,
    Predictions,
    accuracy,
    f1,
    matthews,
    measures,
    paired,
    pearson,
    spearman,
)
from export.finetune.recipe import Distillation, FinetuningRecipe
from export.models.heads import SequenceClassifier, SpanClassifier
from export.models.transformer import Transformer
from export.training import trainer
from export.training.intervals import known_interval
from export.training.points import Planned
from tests.support.task_data import Seen, accuracy_on, fine_tune, make_classifier, make_transformer, same

RECIPE = FinetuningRecipe(epochs=3, batch_size=32, peak_learning_rate=2e-2)


def tune(model, train, holdout, recipe=RECIPE, **options):
    return fine_tune(model, train, recipe, evaluate=accuracy_on(model, holdout), **options)


def test_thirty_steps_learn_a_separable_task(train, holdout):
    model = make_classifier()
    seen = Seen()
    tuned = tune(model, train, holdout, observer=seen)
    steps = seen.steps
    assert max(tuned.scores) > 0.95
    assert accuracy_on(model, holdout)() == max(tuned.scores)
    assert (tuned.steps, len(steps), steps[-1].number, steps[-1].seconds_left) == (30, 30, 30, 0)
    assert steps[0].seconds_left > 0
    assert steps[-1].loss < steps[0].loss / 3
    assert tuned.losses == pytest.approx([sum(s.loss for s in steps[i : i + 10]) / 10 for i in (0, 10, 20)])
    assert [epoch.score.value for epoch in seen.epochs] == list(tuned.scores)
    assert not model.training


@pytest.mark.parametrize(("stop", "average"), [(7, None), (20, None), (14, 0.9)])  # within an epoch, and at its end
def test_an_interrupted_run_ends_with_the_same_bits(stop, average, train, holdout, tmp_path):
    whole, recipe = make_classifier(), replace(RECIPE, average=average)
    expected = tune(whole, train, holdout, recipe)

    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        tune(make_classifier(), train, holdout, recipe, state=state, save_every=3, observer=Seen(stop))
    resumed = make_classifier()
    seen = Seen()
    tuned = tune(resumed, train, holdout, recipe, state=state, save_every=3, observer=seen)
    assert stop - 4 < seen.steps[0].number <= stop  # not from the beginning
    assert seen.steps[-1].number == 30
    assert same(resumed, whole)
    assert (tuned.scores, tuned.losses) == (expected.scores, expected.losses)
    # A finished run is not trained again.
    assert tune(make_classifier(), train, holdout, recipe, state=state).scores == expected.scores


def test_long_steps_are_saved_by_time(train, holdout, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_SAVE_SECONDS", 0.0)
    options, seen = {"state": tmp_path / "state"}, Seen()
    with pytest.raises(KeyboardInterrupt):
        tune(make_classifier(), train, holdout, RECIPE, **options, observer=Seen(stop=7))
    tune(make_classifier(), train, holdout, RECIPE, **options, observer=seen)
    assert seen.steps[0].number == 7  # the sixth step was saved, and the seventh interrupted before


def test_a_state_of_another_run_is_rejected(train, holdout, tmp_path):
    state = tmp_path / "state"
    tune(make_classifier(), train, holdout, replace(RECIPE, epochs=1), state=state)
    for model, recipe, teacher in (
        (make_classifier(seed=1), replace(RECIPE, epochs=1), None),
        (make_classifier(), RECIPE, None),
        (make_classifier(), replace(RECIPE, epochs=1), make_classifier()),
    ):
        with pytest.raises(CheckpointError, match="Delete it"):
            tune(model, train, holdout, recipe, state=state, teacher=teacher)
    state.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="expected the state of a training run"):
        tune(make_classifier(), train, holdout, state=state)
    with pytest.raises(CheckpointError, match="writable"):
        tune(make_classifier(), train, holdout, replace(RECIPE, epochs=1), state=state / "below")


def test_a_loss_that_is_not_finite_stops_the_run(train, holdout):
    model = make_classifier()
    torch.nn.init.constant_(model.classifier.weight, math.nan)
    with pytest.raises(TrainingError, match=r"loss in step 1: got nan.*lower learning rate"):
        tune(model, train, holdout)


@pytest.mark.parametrize(("average", "kept"), [(None, 2), (0.5, 4)])
def test_the_best_epoch_or_the_last_average_is_kept(average, kept, train):
    model, found, scores = make_classifier(), [], iter([0.1, 0.7, 0.7, 0.3])

    def evaluate():
        found.append(copy.deepcopy(model))
        return next(scores)

    recipe = replace(RECIPE, epochs=4, average=average)
    assert fine_tune(model, train, recipe, evaluate=evaluate).best_epoch == kept
    assert [same(model, one) for one in found] == [epoch == kept for epoch in range(1, 5)]


def test_a_student_imitates_its_teacher(train, holdout):
    teacher = make_classifier(seed=3)
    tune(teacher, train, holdout)
    student = SequenceClassifier(make_transformer(layers=1, seed=4), 2)
    # No labels at all: what it learns comes from the teacher.
    blind = Encoded(train.tokens, train.segments, np.zeros_like(train.targets))
    before = copy.deepcopy(teacher)
    recipe = replace(RECIPE, distillation=Distillation(imitation=1.0, hidden=0.1))
    assert max(tune(student, blind, holdout, recipe, teacher=teacher).scores) > 0.9
    assert same(teacher, before)


def test_imitation_is_a_divergence_with_gradients(train):
    batch = train.batch(np.arange(8))
    for model in (make_classifier(), make_classifier(labels=1, regression=True), SpanClassifier(make_transformer())):
        outputs = outputs_of(model, batch)
        assert model.imitation(outputs, outputs, 2.0).item() == pytest.approx(0, abs=1e-6)
        other = outputs_of(copy.deepcopy(model).requires_grad_(False), batch._replace(inputs=batch.inputs.flip(0)))
        loss = model.imitation(outputs, other, 2.0)
        loss.backward()
        assert loss > 0
        assert model.classifier.weight.grad.abs().sum() > 0
    ours, theirs = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    p, q = (torch.softmax(logits / 2, dim=1) for logits in (theirs, ours))
    expected = 4 * float((p * (p / q).log()).sum())
    assert float(make_classifier().imitation(ours, theirs, 2.0)) == pytest.approx(expected, rel=1e-5)


def test_corresponding_layers():
    five, four, two, three = (make_transformer(layers=number).config for number in (5, 4, 2, 3))
    assert corresponding_layers(four, four) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert corresponding_layers(two, four) == ([0, 1], [1, 3])
    assert corresponding_layers(three, five) == ([0, 1, 2], [1, 2, 4])  # 5/3 and 10/3 of five layers
    assert corresponding_layers(five, two) == ([0, 1, 2, 3, 4], [0, 0, 0, 1, 1])
    # What was cut out of five layers goes on to imitate what it was restored to: the state before the next layer.
    planned = Planned(2, "orin", PREDICTION, (), kept=(0, 1, 4), original_layers=5)
    assert corresponding_layers(three, five, planned) == ([0, 1, 2], [0, 3, 4])
    assert corresponding_layers(three, four, planned) == ([0, 1, 2], [0, 2, 3])  # another teacher


def test_hidden_states_of_another_width_are_refused_before_the_training(train):
    student, teacher = SequenceClassifier(make_transformer(layers=2, dim=24), 2), make_classifier()
    options = {"seed": 0, "evaluate": lambda: 0.0, "teacher": teacher}
    message = (
        r"--hidden: got a width of 24, and 32 of the teacher, expected hidden states of one width\. Give --hidden 0"
    )
    with pytest.raises(UsageError, match=message):
        TaskObjective(student, train, RECIPE, **options)
    TaskObjective(student, train, replace(RECIPE, distillation=Distillation(hidden=0)), **options)


def test_hidden_loss_ignores_padding_and_scale():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = hidden_loss([student], [teacher], mask)
    student[0, 2], teacher[1, 1] = 99, 99
    assert torch.equal(hidden_loss([student], [teacher], mask), expected)
    assert torch.allclose(hidden_loss([10 * student], [10 * teacher], mask), expected)


def test_bfloat16_learns_the_task_too_and_takes_other_steps(train, holdout):
    models = {precision: make_classifier() for precision in ("fp32", "bf16")}
    scores = {p: tune(model, train, holdout, replace(RECIPE, precision=p)).scores for p, model in models.items()}
    assert max(scores["bf16"]) > 0.9
    assert not same(models["fp32"], models["bf16"])
    assert all(tensor.dtype == torch.float32 for tensor in models["bf16"].state_dict().values())


ROWS = np.array([3, 0, 4])
#: What bfloat16 keeps of a hidden state: 8 bits.
KEPT = 2**-8


IMAGES = Images(np.random.default_rng(0).random((5, 1, 8, 8), np.float32), np.zeros(5, dtype=np.int64))


def text_rows():
    random = np.random.default_rng(0)
    tokens = tuple(random.integers(4, 30, size=length).astype(np.int32) for length in (3, 9, 5, 7, 2))
    return Encoded(tokens, tuple(np.zeros_like(row) for row in tokens), np.zeros(5, dtype=np.int64))


def make_vit():
    torch.manual_seed(0)
    return SequenceClassifier(Transformer(vit(8, 4, 1, dim=16, depth=2, heads=2)), 3, "summary")


def lessons(model, rows):
    """Return the outputs that a teacher kept for some rows, those that it computes again, and the batch of the rows."""
    batch = rows.batch(ROWS)
    kept, recomputed = (Teacher(model, rows, [0, 1], most_kept_bytes=most) for most in (1 << 20, 0))
    return kept.outputs_for(ROWS, batch, [1]), recomputed.outputs_for(ROWS, batch, [1]), batch


@pytest.mark.parametrize(("make", "rows"), [(make_classifier, text_rows()), (make_vit, IMAGES)])
def test_kept_outputs_of_a_teacher_are_those_of_a_new_run(make, rows):
    kept, recomputed, batch = lessons(make(), rows)
    assert torch.allclose(kept.outputs, recomputed.outputs, atol=1e-5)
    for ours, theirs in zip(kept.states, recomputed.states, strict=True):
        tokens = torch.ones(theirs.shape[:2], dtype=torch.bool) if batch.mask is None else batch.mask.bool()
        assert ours.shape == theirs.shape
        assert torch.allclose(ours[tokens].float(), theirs[tokens], rtol=KEPT, atol=1e-5)
        assert not ours[~tokens].any()


def test_a_kept_span_is_the_same_on_tokens_and_impossible_on_padding():
    kept, recomputed, batch = lessons(SpanClassifier(make_transformer()), text_rows())
    tokens = batch.mask.bool()
    for ours, theirs in zip(kept.outputs, recomputed.outputs, strict=True):
        assert torch.allclose(ours[tokens], theirs[tokens], atol=1e-5)
        assert torch.softmax(ours, dim=1)[~tokens].sum() == 0


def test_kept_outputs_do_not_need_the_model():
    model, rows = make_classifier(), text_rows()
    teacher = Teacher(model, rows, [1])
    before = teacher.outputs_for(ROWS, rows.batch(ROWS), [1])
    torch.nn.init.zeros_(model.classifier.weight)
    assert torch.equal(teacher.outputs_for(ROWS, rows.batch(ROWS), [1]).outputs, before.outputs)


def test_measures_of_classes_are_scikit_learns_for_each_row():
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, targets = np.random.default_rng(2).integers(0, 6, (2, 4, 12))
    predictions[0][predictions[0] == 3] = 4  # a class that some rows have in the targets only, or not at all
    each = [sklearn.f1_score(*pair, average="macro") for pair in zip(targets, predictions, strict=True)]
    assert METRICS["macro_f1"](predictions, targets) == pytest.approx(each)
    predictions, targets = predictions[1] % 2, targets[1] % 2
    for ours, theirs in ((accuracy, "accuracy_score"), (f1, "f1_score"), (matthews, "matthews_corrcoef")):
        assert ours(predictions, targets) == pytest.approx(getattr(sklearn, theirs)(targets, predictions))


def test_correlations_are_scipys():
    random = np.random.default_rng(0)
    targets = random.integers(0, 6, 80).astype(np.float32)  # with ties
    predictions = (targets + random.normal(size=80)).astype(np.float32)
    assert pearson(predictions, targets) == pytest.approx(scipy.stats.pearsonr(predictions, targets)[0], rel=1e-6)
    assert spearman(predictions, targets) == pytest.approx(scipy.stats.spearmanr(predictions, targets)[0], rel=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_undefined_metrics_are_zero_and_those_of_many_rows_are_those_of_each(name):
    assert METRICS[name](np.full(7, 0.1), np.arange(7) % 2 * 2) == 0
    predictions, targets = np.random.default_rng(1).integers(0, 2, (2, 5, 30))
    each = [float(METRICS[name](*pair)) for pair in zip(predictions, targets, strict=True)]
    assert METRICS[name](predictions, targets) == pytest.approx(each)


def test_interval_of_accuracy_is_the_binomials():
    correct = np.arange(1000) < 800
    low, high = known_interval(accuracy, correct, np.ones(1000, dtype=bool))
    assert (low, high) == pytest.approx(tuple(scipy.stats.binom(1000, 0.8).ppf([0.025, 0.975]) / 1000), abs=0.004)
    (one,) = measures(("accuracy",), "dev", correct, np.ones(1000, dtype=bool))
    assert (one.metric, one.split, one.n, one.value) == ("accuracy", "dev", 1000, 0.8)
    assert one.interval == pytest.approx((low, high), abs=0.003)


def test_24_right_answers_are_no_proof_that_all_are_right():
    """Each resample of them is right, too, so the bootstrap would give 1 … 1."""
    targets = np.arange(24) % 2
    found = measures(("accuracy", "macro_f1", "matthews"), "dev", targets, targets)
    assert [one.value for one in found] == [1, 1, 1]
    assert [one.interval for one in found] == [(pytest.approx(24 / (24 + 1.96**2), rel=1e-4), 1), None, None]


def test_a_difference_of_runs_counts_the_spread_of_their_seeds():
    targets = np.arange(40) % 2
    right, half = (Predictions(np.eye(2)[answers], targets) for answers in (targets, np.zeros(40, np.int64)))
    one, two = paired("accuracy", [right], [half]), paired("accuracy", [right, half], [half, half])
    assert (one.value, two.value, paired("accuracy", [half], [half]).interval) == (0.5, 0.25, None)
    assert one.interval[0] > 0.3
    assert two.interval[0] == pytest.approx(0.25 - 12.7 * 0.25, abs=0.05)  # Student's, of two
