"""The losses of fine-tuned models between their training and their use."""

import json
from itertools import product

import pytest
import torch

from export.cli.language import language
from export.generate.finetune import with_lora
from export.generate.formats import Example
from export.generate.model import save_backbone
from export.papers.backward.mismatch import BEGINS, AdapterRecord, Mismatch, MismatchSettings, begin_of, moved_back
from export.papers.experiment import read_records, read_settings
from tests.support.language_models import bpe, tiny_gpt2
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
    unfinished = Mismatch(read_settings(tmp_path / "out", MismatchSettings), tmp_path / "out")
    for table in unfinished.tables(read_records(tmp_path / "out", AdapterRecord)):
        assert {row[0] for row in table.rows} == {"FP32"}  # no base without a record
    assert run() == printed
    again = json.loads(records.read_text().splitlines()[1])
    assert {**again, "seconds": 0} == {**json.loads(second), "seconds": 0}
