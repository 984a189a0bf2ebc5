import copy
import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from edge.errors import UsageError
from export.data.images import Images, vit
from export.data.tokens import Encoded
from export.errors import CheckpointError, TrainingError
from export.finetune.objectives import (
    TaskObjective,
    Teacher,
    corresponding_layers,
    hidden_loss,
    imitation_loss,
    outputs_of,
)
from export.finetune.recipe import Distillation, Recipe
from export.models.heads import SequenceClassifier, SpanClassifier
from export.models.transformer import Transformer
from export.training.recipe import learning_rate
from tests.support.task_data import Seen, accuracy_on, fine_tune, make_classifier, make_transformer, same

RECIPE = Recipe(epochs=3, batch_size=32, peak_learning_rate=2e-2)


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


@pytest.mark.parametrize("stop", [7, 20])  # within an epoch, and at its end
def test_an_interrupted_run_ends_with_the_same_bits(stop, train, holdout, tmp_path):
    whole = make_classifier()
    expected = tune(whole, train, holdout)

    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        tune(make_classifier(), train, holdout, state=state, save_every=3, observer=Seen(stop))
    resumed = make_classifier()
    seen = Seen()
    tuned = tune(resumed, train, holdout, state=state, save_every=3, observer=seen)
    assert stop - 4 < seen.steps[0].number <= stop  # not from the beginning
    assert seen.steps[-1].number == 30
    assert same(resumed, whole)
    assert (tuned.scores, tuned.losses) == (expected.scores, expected.losses)
    # A finished run is not trained again.
    assert tune(make_classifier(), train, holdout, state=state).scores == expected.scores


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


def test_the_best_epoch_is_kept(train):
    model, found, scores = make_classifier(), [], iter([0.1, 0.7, 0.7, 0.3])

    def evaluate():
        found.append(copy.deepcopy(model))
        return next(scores)

    assert fine_tune(model, train, replace(RECIPE, epochs=4), evaluate=evaluate).best_epoch == 2
    assert [same(model, one) for one in found] == [False, True, False, False]


def test_learning_rate_rises_and_falls_in_lines():
    recipe = Recipe(peak_learning_rate=1.0, warmup_share=0.2)
    rates = [learning_rate(recipe, progress) for progress in (0, 0.1, 0.2, 0.6, 1)]
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert learning_rate(Recipe(warmup_share=0.0), 0.0) == Recipe().peak_learning_rate


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
        assert imitation_loss(model, outputs, outputs, 2.0).item() == pytest.approx(0, abs=1e-6)
        other = outputs_of(copy.deepcopy(model).requires_grad_(False), batch._replace(inputs=batch.inputs.flip(0)))
        loss = imitation_loss(model, outputs, other, 2.0)
        loss.backward()
        assert loss > 0
        assert model.classifier.weight.grad.abs().sum() > 0
    ours, theirs = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    p, q = (torch.softmax(logits / 2, dim=1) for logits in (theirs, ours))
    expected = 4 * float((p * (p / q).log()).sum())
    assert float(imitation_loss(make_classifier(), ours, theirs, 2.0)) == pytest.approx(expected, rel=1e-5)


def test_corresponding_layers():
    five, four, two, three = (make_transformer(layers=number) for number in (5, 4, 2, 3))
    assert corresponding_layers(four, four) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert corresponding_layers(two, four) == ([0, 1], [1, 3])
    assert corresponding_layers(three, five) == ([0, 1, 2], [1, 2, 4])  # 5/3 and 10/3 of five layers
    assert corresponding_layers(five, two) == ([0, 1, 2, 3, 4], [0, 0, 0, 1, 1])


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
