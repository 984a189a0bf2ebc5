"""``fewheads language mismatch`` and ``calculator``: what fine-tuned models lose in use, and how they calculate."""

import json
from itertools import product

import numpy as np
import pytest
import torch

from export.cli.language import language
from export.generate.finetune import with_lora
from export.generate.formats import Example
from export.generate.model import Base, save_backbone
from export.papers.backward.calculators import CalculatorRecord
from export.papers.backward.mismatch import BEGINS, AdapterRecord, Mismatch, MismatchSettings, begin_of, moved_back
from export.papers.experiment import read_records, read_settings
from tests.support.language_models import bpe, tiny_gpt2, tiny_of
from tests.support.task_data import invoke

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


@pytest.mark.parametrize(("kind", "has_adapters"), [("gpt2", False), ("gpt2", True), ("gemma3_text", True)])
def test_a_token_in_front_moves_the_others_unless_their_places_are_kept(kind, has_adapters):
    plain = tiny_gpt2() if kind == "gpt2" else tiny_of(kind, bpe())
    model = with_lora(plain, 2, 0).eval() if has_adapters else plain
    ids = torch.arange(4, 12)[None]  # of the end, which pads, the embedding of some models is 0
    more = torch.cat([ids[:, :1], ids], dim=1)
    places = torch.tensor([[0, *range(8)]])
    expected = plain(more, position_ids=places, attention_mask=torch.ones_like(more)).logits
    with moved_back(model, 1):
        found = model(more, use_cache=False).logits
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[:, 1:], plain(ids).logits, atol=0.01)  # the token counts, wherever the others are
    assert not torch.allclose(found, plain(more).logits, atol=0.01)
    torch.testing.assert_close(model(more, use_cache=False).logits, plain(more).logits)


def test_one_command_scores_all_conditions_and_resumes(tmp_path):
    save_backbone(tiny_of("gemma3_text", bpe()), bpe(), tmp_path / "toy")

    def run():
        arguments = ("--limit", 20, "--epochs", 1, "--rank", 2, "--seeds", 1, "--device", "cpu", "--json")
        return json.loads(invoke(language, "mismatch", tmp_path / "toy", "--out", tmp_path / "out", *arguments))

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
    unfinished = Mismatch(read_settings(tmp_path / "out", MismatchSettings), tmp_path / "out")
    for table in unfinished.tables(read_records(tmp_path / "out", AdapterRecord)):
        assert {row[0] for row in table.rows} == {"FP32"}  # no base without a record
    assert run() == printed
    again = json.loads(records.read_text().splitlines()[1])
    assert {**again, "seconds": 0} == {**json.loads(second), "seconds": 0}


def test_one_command_fine_tunes_calculators_that_answer_as_those_of_finetune_and_resumes(tmp_path):
    save_backbone(tiny_of("llama", bpe()), bpe(), tmp_path / "toy")
    shared = ("--limit", 60, "--epochs", 8, "--device", "cpu", "--json")

    def run():
        arguments = ("--rank", 2, "--full-lr", 1e-2, "--lr", 1e-1, "--seeds", 2, "--precision", "fp32", *shared)
        return json.loads(invoke(language, "calculator", tmp_path / "toy", "--out", tmp_path / "out", *arguments))

    printed = run()
    (table,) = printed["tables"]
    by_way = {row[0]: row for row in table["rows"]}
    assert table["heads"][4:] == ["calculator/in_range", "calculator/out_of_range", "calculator/long"]
    base = Base(tmp_path / "toy")
    assert by_way["all weights"][1] == base.model.num_parameters() > by_way["LoRA of rank 2"][1] > 0
    records = read_records(tmp_path / "out", CalculatorRecord)
    for way, options in (("all-weights", ("--full", "--lr", 1e-2)), ("LoRA-of-rank-2", ("--rank", 2, "--lr", 1e-1))):
        name, right = way.lower(), records[f"{way}-seed0"].right
        data = ("--data", "calculator:train", "--out", tmp_path, *options, *shared)
        invoke(language, "finetune", name, "--backbone", tmp_path / "toy", *data)
        tests = (argument for split in right for argument in ("--data", split.replace("/", ":")))
        measured = json.loads(invoke(language, "evaluate", tmp_path / name, *tests, *shared[:2], "--json"))["measures"]
        expected = {of["split"]: of["value"] for of in measured if of["metric"] == "exact_match"}
        assert {split: np.mean(of) for split, of in right.items()} == expected
        assert any(expected.values()), "answers of which none is right would also be those of other models"
    both = [records[f"all-weights-seed{seed}"].right["calculator/in_range"] for seed in range(2)]
    assert by_way["all weights"][4]["value"] == pytest.approx(100 * np.mean(both))
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "records.jsonl").write_text("".join(lines[:-1]))
    assert run() == printed
