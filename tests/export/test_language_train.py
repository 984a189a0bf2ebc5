import json
from typing import get_args

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace

from edge.errors import UsageError
from export.commands.language import language
from export.errors import DataError
from export.generate.backbone import load_backbone
from export.generate.evaluate import encode_fitting, evaluate
from export.generate.files import is_language_model
from export.generate.formats import Example, Source
from export.generate.objective import LanguageObjective, padded, teacher_forced
from export.generate.recipes import Size, plan_of
from export.generate.tokenizer import TextTokenizer
from export.generate.train import Corpus, read_corpus, tokenizer_for, train_language
from export.training.objective import Observer
from tests.support.language_models import EXAMPLES, bpe, tiny_gpt2
from tests.support.task_data import invoke

pytest.importorskip("transformers")

ROWS = [bpe().encode(one) for one in (*EXAMPLES, Example("Why?", "Because of it.", "7"))]
CORPUS = Corpus(EXAMPLES[4:], EXAMPLES[:4], "sums")


def objective(model, **options):
    return LanguageObjective(model, ROWS, ROWS[:3], **{"seed": 0, "batch_size": 5, "steps_per_epoch": 6, **options})


def losses_by_hand(model, row):
    """Return the cross-entropies of a row's learnt tokens, from the whole row alone."""
    ids = torch.tensor(row.ids[None].astype(np.int64))
    logs = model(ids).logits[0].log_softmax(-1)
    return torch.stack([-logs[place - 1, row.ids[place]] for place in np.flatnonzero(row.learnt)])


def test_the_loss_is_the_mean_over_learnt_tokens_whatever_the_padding():
    model = tiny_gpt2()
    rows = [ROWS[0], ROWS[-1]]
    assert len(rows[0].ids) != len(rows[1].ids)
    expected = torch.cat([losses_by_hand(model, row) for row in rows])
    loss = objective(model).loss(padded(rows, torch.device("cpu")), 0.0)
    torch.testing.assert_close(loss, expected.mean())
    forced = teacher_forced(model, [rows[1], rows[0]], batch_size=1)
    reverse = torch.cat([losses_by_hand(model, row) for row in (rows[1], rows[0])])
    np.testing.assert_allclose(forced.losses, reverse.detach(), rtol=1e-4)
    assert forced.targets.tolist() == [*rows[1].ids[rows[1].learnt], *rows[0].ids[rows[0].learnt]]
    assert forced.rows.tolist() == [0] * rows[1].learnt.sum() + [1] * rows[0].learnt.sum()
    assert objective(model).evaluate().value == pytest.approx(-teacher_forced(model, ROWS[:3]).losses.mean())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_batches_depend_on_seed_and_step_alone_and_a_pass_has_every_row():
    model = tiny_gpt2()
    one = objective(model, steps_per_epoch=8)  # a pass of 37 rows
    batches = list(one.batches(0, 0))
    assert sorted(tuple(row[mask]) for batch in batches for row, mask in zip(*prompts(batch), strict=True)) == sorted(
        tuple(row.ids[~row.learnt]) for row in ROWS
    )
    other = objective(model, steps_per_epoch=4)  # the same steps in epochs of another length
    for place, batch in [
        (3, next(other.batches(0, 3))),
        (4, next(other.batches(1, 0))),
        (6, next(other.batches(1, 2))),
    ]:
        assert torch.equal(batch.ids, batches[place].ids)
    again = [objective(model, seed=1, steps_per_epoch=8).batches(0, 0), one.batches(1, 0)]
    for changed in map(list, again):
        assert not all(torch.equal(a.ids, b.ids) for a, b in zip(changed, batches, strict=True))


def prompts(batch):
    """Return the ids of a batch, and where its prompts are: before the first learnt token."""
    return batch.ids.numpy(), (batch.learnt.cumsum(1) == 0).numpy()


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 6}, {"steps_per_epoch": 7}])
def test_a_training_resumes_no_other_settings(change):
    model = tiny_gpt2()
    assert objective(model).fingerprint() == objective(model).fingerprint()
    assert objective(model).fingerprint() != objective(model, **change).fingerprint()


class Interrupt(Observer):
    def __init__(self, step):
        self.step, self.resumed = step, []

    def on_resume(self, step, steps):
        self.resumed.append((step, steps))

    def on_step(self, step):
        if step.number == self.step:
            raise KeyboardInterrupt


def test_an_interrupted_training_resumes_to_the_same_model(tmp_path):
    plan = plan_of("tiny", steps=6)
    plan = replace(plan, recipe=replace(plan.recipe, epochs=2, batch_size=8))
    whole = train_language("one", CORPUS, bpe(), plan, tmp_path / "whole", seed=0)
    with pytest.raises(KeyboardInterrupt):
        train_language("one", CORPUS, bpe(), plan, tmp_path / "again", seed=0, observer=Interrupt(5))
    assert not (tmp_path / "again").exists()
    seen = Interrupt(0)
    again = train_language("one", CORPUS, bpe(), plan, tmp_path / "again", seed=0, observer=seen)
    assert seen.resumed == [(3, 6)]
    assert (again.scores, again.losses, again.measures) == (whole.scores, whole.losses, whole.measures)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]
    assert not list(tmp_path.glob(".*"))


def test_every_size_trains_in_fp32_unless_another_precision_is_given():
    assert {plan_of(size).recipe.precision for size in get_args(Size)} == {"fp32"}
    assert plan_of("gpt2", precision="bf16").recipe.precision == "bf16"


def test_a_model_learns_sums_by_heart(tmp_path):
    plan = plan_of("tiny", steps=80)
    plan = replace(plan, recipe=replace(plan.recipe, batch_size=8, peak_learning_rate=2e-2))
    corpus = Corpus(EXAMPLES[4:12], EXAMPLES[:4], "sums")
    train_language("sums", corpus, bpe(), plan, tmp_path / "sums", seed=0)
    model, tokenizer = load_backbone(tmp_path / "sums"), TextTokenizer.load(tmp_path / "sums")
    found = {
        measure.metric: measure.value for measure in evaluate(model, tokenizer, "train", corpus.train, max_tokens=9)
    }
    assert (found["exact_match"], found["unparsable"]) == (1, 0)
    assert found["cross_entropy"] < 0.3


def test_examples_that_are_too_long_are_left_out_and_counted(tmp_path):
    long = Example("Long?", "word " * 100, "1")
    corpus = Corpus((*EXAMPLES[4:], long), EXAMPLES[:4], "sums")
    train_language("one", corpus, bpe(), replace(plan_of("tiny", steps=1), positions=64), tmp_path / "one", seed=0)
    record = json.loads((tmp_path / "one" / "training.json").read_text())
    assert record["provenance"]["data"] == "sums; 32 trained on, 1 with more than 64 tokens left out"
    with pytest.raises(DataError, match="got 1, all longer, expected some of at most 64 tokens"):
        encode_fitting(bpe(), [long], 64)


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


def test_the_tokenizer_is_trained_or_that_of_another_model(tmp_path):
    train_language("one", CORPUS, bpe(), plan_of("tiny", steps=1), tmp_path / "one", seed=0)
    assert tokenizer_for(CORPUS, str(tmp_path / "one"), 300).tokenizer.to_str() == bpe().tokenizer.to_str()
    assert tokenizer_for(CORPUS, "characters", 300).size < tokenizer_for(CORPUS, "bpe", 280).size == 280


def test_the_commands_train_and_evaluate(tmp_path):
    options = ("--size", "tiny", "--steps", 4, "--tokenizer", "characters", "--seed", 3, "--limit", 80)
    train = ("train", "sums", *options, "--data", "calculator:train", "--out", tmp_path)
    trained = json.loads(invoke(language, *train, "--json"))
    assert is_language_model(tmp_path / "sums")
    assert {measure["split"] for measure in trained["metrics"]["measures"]} == {"holdout"}
    with pytest.raises(UsageError, match=r"got an existing language model, expected a free path\. Give --replace"):
        invoke(language, *train)
    assert "perplexity" in invoke(language, *train, "--replace")
    data = ("--data", "calculator:in_range", "--data", "calculator:long", "--limit", 5)
    found = json.loads(invoke(language, "evaluate", tmp_path / "sums", *data, "--temperature", 1, "--json"))
    assert found["decoding"]["temperature"] == 1
    assert {(one["split"], one["n"]) for one in found["measures"] if one["metric"] == "exact_match"} == {
        ("calculator/in_range", 5),
        ("calculator/long", 5),
    }
    assert "calculator/long" in invoke(language, "evaluate", tmp_path / "sums", *data, "--max-tokens", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "a/b", "--data", "calculator:train"), "NAME: got 'a/b', expected lower-case letters"),
        (("train", "a", "--data", "calculator"), "--data: got 'calculator', expected FORMAT:PATH"),
        (
            ("train", "a", "--data", "calculator:train", "--tokenizer", "characters", "--vocabulary", 9),
            "--vocabulary: got 9, expected --tokenizer bpe. Leave --vocabulary out.",
        ),
        (
            ("evaluate", ".", "--data", "calculator:train", "--top-k", 5),
            "--top-k: got 5, expected --temperature above 0 beside it",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    result = CliRunner().invoke(language, list(map(str, arguments)))
    assert message in str(result.exception)


def test_other_files_are_never_replaced(tmp_path):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="got something that is not a run"):
        invoke(language, "train", "sums", "--data", "calculator:train", "--out", tmp_path, "--replace")
    with pytest.raises(UsageError, match="a directory that holds"):
        invoke(language, "train", "sums", "--data", f"mathematics:{tmp_path / 'sums' / 'notes.txt'}", "--out", tmp_path)
