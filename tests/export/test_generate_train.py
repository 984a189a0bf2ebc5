"""Training of language models, its data, its measures, and the commands."""

import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.errors import UsageError
from export.cli.language import language
from export.errors import DataError
from export.generate.evaluate import (
    TeacherForced,
    answer_measures,
    encode_fitting,
    evaluate,
    padded,
    teacher_forced,
    token_measures,
)
from export.generate.files import is_language_model
from export.generate.formats import Example, Source
from export.generate.model import load_backbone
from export.generate.tokenizer import TextTokenizer
from export.generate.train import Corpus, LanguageObjective, Size, preset_of, read_corpus, tokenizer_for, train_language
from export.training.recipe import Recipe
from tests.support.language_models import EXAMPLES, bpe, tiny_gpt2
from tests.support.task_data import invoke

pytest.importorskip("transformers")

ROWS = [bpe().encode(example) for example in (*EXAMPLES, Example("Why?", "Because of it.", "7"))]
CORPUS = Corpus(EXAMPLES[4:], EXAMPLES[:4], "sums")
TOKENS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=3, max_size=30)


def objective(model, batch_size=5, **options):
    recipe = Recipe(epochs=1, peak_learning_rate=1e-3, batch_size=batch_size)
    return LanguageObjective(model, ROWS, ROWS[:3], recipe, **{"seed": 0, "steps_per_epoch": 6, **options})


def losses_by_hand(model, row):
    """Return the cross-entropies of a row's learnt tokens, from the whole row alone."""
    ids = torch.tensor(row.ids[None].astype(np.int64))
    logs = model(ids).logits[0].log_softmax(-1)
    return torch.stack([-logs[token - 1, row.ids[token]] for token in np.flatnonzero(row.learnt)])


def test_the_loss_is_the_mean_over_learnt_tokens_whatever_the_padding():
    model = tiny_gpt2()
    rows = [ROWS[0], ROWS[-1]]
    assert len(rows[0].ids) != len(rows[1].ids)
    by_hand = [losses_by_hand(model, row) for row in rows]
    loss = objective(model).loss(padded(rows, torch.device("cpu")), 0.0)
    torch.testing.assert_close(loss, torch.cat(by_hand).mean())
    forced = teacher_forced(model, rows[::-1], batch_size=1)
    np.testing.assert_allclose(forced.losses, torch.cat(by_hand[::-1]).detach(), rtol=1e-4)
    assert forced.targets.tolist() == [*rows[1].ids[rows[1].learnt], *rows[0].ids[rows[0].learnt]]
    assert forced.rows.tolist() == [0] * rows[1].learnt.sum() + [1] * rows[0].learnt.sum()
    assert objective(model).evaluate().value == pytest.approx(-teacher_forced(model, ROWS[:3]).losses.mean())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_batches_depend_on_seed_and_step_alone_and_a_pass_has_every_row():
    model = tiny_gpt2()
    original = objective(model, steps_per_epoch=8)  # a pass of 37 rows
    batches = list(original.batches(0, 0))
    prompts = [ids[learnt.cumsum(0) == 0] for batch in batches for ids, learnt in zip(*batch, strict=True)]
    assert sorted(map(tuple, map(torch.Tensor.tolist, prompts))) == sorted(tuple(row.ids[~row.learnt]) for row in ROWS)
    shorter = objective(model, steps_per_epoch=4)  # the same steps in epochs of another length
    for step, epoch, first in ((3, 0, 3), (4, 1, 0), (6, 1, 2)):
        assert torch.equal(next(shorter.batches(epoch, first)).ids, batches[step].ids)
    for changed in (objective(model, seed=1, steps_per_epoch=8).batches(0, 0), original.batches(1, 0)):
        assert not all(torch.equal(a.ids, b.ids) for a, b in zip(changed, batches, strict=True))


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 6}, {"steps_per_epoch": 7}])
def test_a_training_resumes_no_other_settings(change):
    model = tiny_gpt2()
    assert objective(model).fingerprint() == objective(model).fingerprint()
    assert objective(model).fingerprint() != objective(model, **change).fingerprint()


def test_a_model_learns_sums_by_heart(tmp_path):
    assert {preset_of(size).recipe.precision for size in get_args(Size)} == {"fp32"}
    assert preset_of("gpt2", precision="bf16").recipe.precision == "bf16"
    preset = preset_of("tiny", steps=80)
    preset = replace(preset, recipe=replace(preset.recipe, batch_size=8, peak_learning_rate=2e-2))
    corpus = Corpus(EXAMPLES[4:12], EXAMPLES[:4], "sums")
    train_language("sums", corpus, bpe(), preset, tmp_path / "sums", seed=0)
    model, tokenizer = load_backbone(tmp_path / "sums"), TextTokenizer.load(tmp_path / "sums")
    values = {of.metric: of.value for of in evaluate(model, tokenizer, "train", corpus.train, max_tokens=9)}
    assert (values["exact_match"], values["unparsable"]) == (1, 0)
    assert values["cross_entropy"] < 0.3


def test_examples_that_are_too_long_are_left_out_and_counted(tmp_path):
    long = Example("Long?", "word " * 100, "1")
    corpus = Corpus((*EXAMPLES[4:], long), EXAMPLES[:4], "sums")
    train_language("one", corpus, bpe(), replace(preset_of("tiny", steps=1), positions=64), tmp_path / "one", seed=0)
    record = json.loads((tmp_path / "one" / "training.json").read_text())
    assert record["provenance"]["data"] == "sums; 32 trained on, 1 with more than 64 tokens left out"
    with pytest.raises(DataError, match="got 1, all longer, expected some of at most 64 tokens"):
        encode_fitting(bpe(), [long], 64)
    assert tokenizer_for(CORPUS, str(tmp_path / "one"), 300).tokenizer.to_str() == bpe().tokenizer.to_str()
    assert tokenizer_for(CORPUS, "characters", 300).size < tokenizer_for(CORPUS, "bpe", 280).size == 280


def test_no_question_of_the_hold_out_is_trained_on(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("".join(f"{number % 40}?\n{number}\n" for number in range(100)))
    source = Source("mathematics", str(path))
    corpus = read_corpus([source], seed=0)
    held_out = {example.prompt for example in corpus.holdout}
    assert len(corpus.holdout) == 10
    assert {example.prompt for example in corpus.train} == {f"{number}?" for number in range(40)} - held_out
    assert read_corpus([source], seed=0) == corpus
    assert read_corpus([source], seed=1).holdout != corpus.holdout
    path.write_text("one?\n1\none?\n1\n")
    with pytest.raises(DataError, match="got 2, expected two or more different questions"):
        read_corpus([source], seed=0)


def forced(pairs, losses=None):
    """Return predictions of (predicted, right) tokens, three examples, the last of which has the rest."""
    predicted, targets = np.array(pairs).T
    rows = np.minimum(np.arange(len(pairs)), 2)
    return TeacherForced(rows, np.ones(len(pairs)) if losses is None else np.array(losses), predicted, targets)


def by_name(measures):
    return {measure.metric: measure for measure in measures}


@settings(deadline=None)  # the first call imports scikit-learn
@given(TOKENS)
def test_precision_recall_and_f1_are_scikit_learns(pairs):
    metrics = pytest.importorskip("sklearn.metrics")
    measures = by_name(token_measures("test", forced(pairs)))
    predicted, targets = np.array(pairs).T
    expected = metrics.precision_recall_fscore_support(targets, predicted, average="macro", zero_division=0)[:3]
    for name, value in zip(("precision", "recall", "f1"), expected, strict=True):
        measure = measures[f"token_{name}"]
        assert measure.value == pytest.approx(value)
        assert measure.interval is None or 0 <= measure.interval[0] < measure.interval[1] <= 1


def test_intervals_contain_scores_in_spite_of_rare_tokens():
    generator = np.random.default_rng(0)
    targets = np.concatenate([generator.integers(0, 2, 600), np.arange(2, 102)])  # most tokens occur once, wrongly
    predicted = np.where(targets < 2, targets, 0)
    rows = generator.permutation(np.arange(700) // 7)
    order = np.argsort(rows, kind="stable")
    scattered = TeacherForced(rows[order], np.ones(700), predicted[order], targets[order])
    f1 = by_name(token_measures("test", scattered))["token_f1"]
    assert f1.interval[0] <= f1.value <= f1.interval[1]


def test_cross_entropy_is_per_token_and_perplexity_its_exponential():
    measures = by_name(token_measures("test", forced([(1, 1)] * 4, [1.0, 2.0, 3.0, 6.0])))
    ce, perplexity = measures["cross_entropy"], measures["perplexity"]
    assert (ce.value, ce.n) == (3.0, 3)
    assert perplexity.value == pytest.approx(math.e**3)
    assert perplexity.interval == pytest.approx(tuple(math.exp(bound) for bound in ce.interval))
    assert ce.interval == (1.0, 4.5)  # resamples of the first example alone, and of the third, whose mean is 4.5


def test_answers_are_compared_as_numbers_and_unparsable_ones_are_counted_apart():
    right = ["4", "1/2", "-3", "True", "100"]
    measures = by_name(answer_measures("test", ["4.0", "3.5", None, "True", "a, b"], right))
    assert {name: (measure.value, measure.n) for name, measure in measures.items()} == {
        "exact_match": (0.4, 5),
        "unparsable": (0.5, 4),
        "mse": (4.5, 2),
        "rmse": (4.5**0.5, 2),
    }
    assert measures["rmse"].interval == pytest.approx((0, 3))
    assert measures["exact_match"].interval == pytest.approx((0.1176, 0.7693), abs=1e-4)  # Wilson's
    assert set(by_name(answer_measures("test", ["True"], ["False"]))) == {"exact_match"}
    assert set(by_name(answer_measures("test", [None], ["1"]))) == {"exact_match", "unparsable"}


def test_the_commands_train_and_evaluate(tmp_path):
    options = ("--size", "tiny", "--steps", 4, "--tokenizer", "characters", "--seed", 3, "--limit", 80)
    train = ("train", "sums", *options, "--data", "calculator:train", "--out", tmp_path)
    trained = json.loads(invoke(language, *train, "--json"))
    assert is_language_model(tmp_path / "sums")
    assert {measure["split"] for measure in trained["metrics"]["measures"]} == {"holdout"}
    with pytest.raises(UsageError, match=r"an existing model of fewheads language, .* free path\. Give --replace"):
        invoke(language, *train)
    assert "perplexity" in invoke(language, *train, "--replace")
    data = ("--data", "calculator:in_range", "--data", "calculator:long", "--limit", 5)
    evaluated = json.loads(invoke(language, "evaluate", tmp_path / "sums", *data, "--temperature", 1, "--json"))
    assert evaluated["decoding"]["temperature"] == 1
    splits = {(of["split"], of["n"]) for of in evaluated["measures"] if of["metric"] == "exact_match"}
    assert splits == {("calculator/in_range", 5), ("calculator/long", 5)}
    assert "calculator/long" in invoke(language, "evaluate", tmp_path / "sums", *data, "--max-tokens", 2)
