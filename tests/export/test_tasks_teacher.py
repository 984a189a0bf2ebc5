import numpy as np
import pytest
import torch

from export.heads import SequenceClassifier, SpanClassifier
from export.tasks.images import Images, vit
from export.tasks.teacher import Teacher
from export.tasks.tokens import Encoded
from export.transformer import Transformer
from tests.support.task_data import make_classifier, make_transformer

ROWS = np.array([3, 0, 4])
#: What bfloat16 keeps of a hidden state: 8 bits.
KEPT = 2**-8


def text_rows():
    random = np.random.default_rng(0)
    tokens = tuple(random.integers(4, 30, size=length).astype(np.int32) for length in (3, 9, 5, 7, 2))
    return Encoded(tokens, tuple(np.zeros_like(row) for row in tokens), np.zeros(5, dtype=np.int64))


def image_rows():
    pixels = np.random.default_rng(0).standard_normal((5, 1, 8, 8)).astype(np.float32)
    return Images(pixels, np.zeros(5, dtype=np.int64))


def make_vit():
    torch.manual_seed(0)
    return SequenceClassifier(Transformer(vit(8, 4, 1, dim=16, depth=2, heads=2)), 3, "summary")


def lessons(model, rows):
    """Return what the teacher kept, and what it says when it may keep nothing, of the same rows."""
    batch = rows.batch(ROWS)
    kept, asked = (Teacher(model, rows, [0, 1], most_kept_bytes=most) for most in (1 << 20, 0))
    return kept.outputs_for(ROWS, batch), asked.outputs_for(ROWS, batch), batch


@pytest.mark.parametrize(("make", "rows"), [(make_classifier, text_rows()), (make_vit, image_rows())])
def test_kept_outputs_of_a_teacher_are_those_of_a_new_run(make, rows):
    kept, asked, batch = lessons(make(), rows)
    assert torch.allclose(kept.outputs, asked.outputs, atol=1e-5)
    for ours, theirs in zip(kept.states, asked.states, strict=True):
        tokens = torch.ones(theirs.shape[:2], dtype=torch.bool) if batch.mask is None else batch.mask.bool()
        assert ours.shape == theirs.shape
        assert torch.allclose(ours[tokens].float(), theirs[tokens], rtol=KEPT, atol=1e-5)
        assert not ours[~tokens].any()


def test_a_kept_span_is_the_same_on_tokens_and_impossible_on_padding():
    rows = text_rows()
    kept, asked, batch = lessons(SpanClassifier(make_transformer()), rows)
    tokens = batch.mask.bool()
    for ours, theirs in zip(kept.outputs, asked.outputs, strict=True):
        assert torch.allclose(ours[tokens], theirs[tokens], atol=1e-5)
        assert torch.softmax(ours, dim=1)[~tokens].sum() == 0


def test_kept_outputs_do_not_need_the_model():
    model, rows = make_classifier(), text_rows()
    teacher = Teacher(model, rows, [1])
    before = teacher.outputs_for(ROWS, rows.batch(ROWS))
    torch.nn.init.zeros_(model.classifier.weight)
    assert torch.equal(teacher.outputs_for(ROWS, rows.batch(ROWS)).outputs, before.outputs)
