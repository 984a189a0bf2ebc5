"""The losses of fine-tuned models between their training and their use."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export.cli.language import language
from export.generate.decoding import complete_tokens
from export.generate.evaluate import teacher_forced
from export.generate.finetune import with_lora
from export.generate.formats import Example
from export.generate.model import BaseIdentity, save_backbone
from export.papers.backward.mismatch import (
    BASES,
    BEGINS,
    SWITCHES,
    AdapterRecord,
    Mismatch,
    MismatchSettings,
    Scores,
    begin_of,
    moved_back,
)
from export.training.provenance import processor
from tests.support.language_models import EXAMPLES, bpe, tiny_gpt2
from tests.support.task_data import invoke

pytest.importorskip("transformers")
pytest.importorskip("peft")

ONE = Example("What is 1 plus 2?", "", "3")


def test_a_second_begin_token_adds_exactly_one_token():
    tokenizer = bpe()
    begin = begin_of(tokenizer)
    assert begin == (tokenizer.end,)
    none, once, twice = (tokenizer.beginning_with(begin * times) for times in range(3))
    assert twice.prompt("Why?") == [*begin, *once.prompt("Why?")] == [*begin, *begin, *none.prompt("Why?")]
    rows = [one.encode(ONE) for one in (once, twice)]
    assert rows[1].ids.tolist() == [*begin, *rows[0].ids]
    assert rows[1].learnt.tolist() == [False, *rows[0].learnt]
    assert begin_of(once.beginning_with([7])) == (7,)
    assert tokenizer.begin == []


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(BEGINS))
def test_both_ways_to_predict_agree_on_whole_completions(seed, begin):
    """The first wrong token is the same, because all before it are right."""
    tokenizer = bpe().beginning_with([bpe().end] * (1 if begin == "once" else 2))
    model = tiny_gpt2(seed)
    prompts = [tokenizer.prompt(one.prompt) for one in EXAMPLES[:6]]
    most = 5
    kept = 1 if begin == "twice, places kept" else 0
    with moved_back(model, kept):
        written = complete_tokens(model, prompts, most, batch_size=3)
    rows = [tokenizer.encode(one) for one in EXAMPLES[:6]]
    # Right completions are what the model itself writes in every second row, so that both outcomes occur.
    for place in (0, 2, 4):
        ids = np.array([*prompts[place], *written[place]], dtype=np.int32)
        rows[place] = type(rows[place])(ids, np.arange(len(ids)) >= len(prompts[place]))
    with moved_back(model, kept):
        forced = teacher_forced(model, rows)
    for number, row in enumerate(rows):
        of_row = forced.rows == number
        right = row.ids[row.learnt].tolist()
        is_forced = (forced.predicted == forced.targets)[of_row].all()
        assert is_forced == (written[number][: len(right)] == right)
        if number % 2 == 0:
            assert is_forced


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_token_in_front_moves_the_others_unless_their_places_are_kept(has_adapters):
    plain = tiny_gpt2()
    model = with_lora(plain, 2, 0).eval() if has_adapters else plain
    ids = torch.tensor([[bpe().end, *range(5, 12)]])
    more = torch.cat([ids[:, :1], ids], dim=1)
    places = torch.tensor([[0, *range(8)]])
    expected = plain(more, position_ids=places, attention_mask=torch.ones_like(more)).logits
    with moved_back(model, 1):
        found = model(more, use_cache=False).logits
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[:, 1:], plain(ids).logits, atol=0.01)  # the token counts, wherever the others are
    assert not torch.allclose(found, plain(more).logits, atol=0.01)
    torch.testing.assert_close(model(more, use_cache=False).logits, plain(more).logits)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "toy"
    save_backbone(tiny_gpt2(), bpe(), path)
    return path


def test_one_command_scores_all_conditions_and_resumes(backbone, tmp_path):
    def run():
        arguments = ("--limit", 20, "--epochs", 1, "--rank", 2, "--seeds", 1, "--device", "cpu", "--json")
        return json.loads(invoke(language, "mismatch", backbone, "--out", tmp_path / "out", *arguments))

    printed = run()
    effects, every = printed["tables"]
    splits = ("training", "calculator/in_range", "calculator/out_of_range", "calculator/long")
    bases = [(base, use) for base in ("FP32", "NF4") for use in (f"{base}, its own", "FP32, merged")]
    assert {tuple(row[:4]) for row in every["rows"]} == {
        (*of, *rest) for of in bases for rest in product(BEGINS, splits)
    }
    assert effects["heads"][2:] == list(splits)
    completions = 12 * (18 + 3 * 20)
    assert f"free writing agree on {completions} of {completions} whole completions" in printed["text"]
    assert printed["text"].partition("\n")[0] in (tmp_path / "out" / "report.md").read_text()
    fp32 = {tuple(row[1:4]): row[4:] for row in every["rows"] if row[0] == "FP32"}
    assert all(fp32["FP32, its own", begin, split] == fp32["FP32, merged", begin, split] for _, begin, split in fp32)
    records = tmp_path / "out" / "records.jsonl"
    first, second = records.read_text().splitlines()
    records.write_text(f"{first}\n")
    assert run() == printed
    again = json.loads(records.read_text().splitlines()[1])
    assert {**again, "seconds": 0} == {**json.loads(second), "seconds": 0}


def make_record(seed, accuracy):
    """Return a record; ``accuracy`` gives the share of right answers from split, merged and begin."""
    generator = np.random.default_rng(seed)
    scores = []
    for split in ("training", "test"):
        for merged in (False, True):
            for begin in BEGINS:
                right = generator.permutation(200) < round(200 * accuracy(split, merged, begin))
                scores.append(
                    Scores(
                        split=split, merged=merged, begin=begin, tokens=(4,) * 200,
                        hits=tuple(4 if one else 3 for one in right),
                        written=tuple(map(bool, right)), answered=tuple(map(bool, right)),
                    )
                )  # fmt: skip
    return AdapterRecord(parameters=1, best_epoch=1, scores=tuple(scores))


def experiment_of(tmp_path, seeds):
    base = BaseIdentity("toy", "0" * 64)
    values = {"data": {"train": "", "test": ""}, "begin": (0,), "rank": 1, "epochs": 1, "rate": 1e-3}
    return Mismatch(MismatchSettings(base=base, **values, seeds=seeds, processor=processor()), tmp_path)


@pytest.mark.parametrize(
    ("accuracy", "switch"),
    [
        (lambda split, merged, begin: 1.0 - 0.5 * merged, "merged into the FP32 base"),
        (lambda split, merged, begin: 1.0 - 0.5 * (begin == "twice, places kept"), "begin token twice, places kept"),
        (lambda split, merged, begin: 1.0 - 0.5 * (begin == "twice"), "begin token twice"),
        (lambda split, merged, begin: 0.5, "whole completions, not tokens"),
    ],
)
def test_each_switch_has_its_change(tmp_path, accuracy, switch):
    experiment = experiment_of(tmp_path, seeds=3)
    records = {part.name: make_record(part.arguments[1], accuracy) for part in experiment.parts()}
    assert experiment.text(records).startswith(f"Teacher forcing and free writing agree on {6 * 2 * 6 * 200:,} of")
    effects, _ = experiment.tables(records)
    assert len(effects.rows) == len(BASES) * len(SWITCHES)
    changes = {row[1]: row[3] for row in effects.rows if row[0] == "NF4"}
    expected = -37.5 if switch.startswith("whole") else -50.0  # of the tokens, three of four are right in wrong ones
    assert changes[switch].startswith(f"{expected:+.1f} (")
    lost = {name for name, change in changes.items() if not change.startswith(("+0.0", "-0.0"))}
    assert lost - {"merged, and begin token twice"} == {switch}


def test_a_report_has_no_base_without_a_record(tmp_path):
    experiment = experiment_of(tmp_path, seeds=1)
    effects, every = experiment.tables({"fp32-seed0": make_record(0, lambda *_: 0.5)})
    assert {row[0] for row in (*effects.rows, *every.rows)} == {"FP32"}
