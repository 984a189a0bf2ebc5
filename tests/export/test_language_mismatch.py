"""What fine-tuned models lose between their training and their use."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import UsageError
from export.commands.language_group import language
from export.errors import CheckpointError
from export.generate.backbone import save_backbone
from export.generate.decoding import complete_tokens
from export.generate.finetuned import with_lora
from export.generate.formats import Example
from export.generate.objective import teacher_forced
from export.papers.backward.mismatch.parts import BASES, begin_of
from export.papers.backward.mismatch.places import moved_back
from export.papers.backward.mismatch.records import BEGINS, Part, Scores
from export.papers.backward.mismatch.results import Results
from export.papers.backward.mismatch.summary import SWITCHES, Summary
from export.papers.experiment import read_part
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


@pytest.fixture(scope="module")
def compared(backbone, tmp_path_factory):
    """Directory of the experiment with one seed, and what the command printed."""
    out = tmp_path_factory.mktemp("mismatch") / "out"
    return out, run(backbone, out)


def run(backbone, out, *options):
    arguments = ("--limit", 20, "--epochs", 1, "--rank", 2, "--seeds", 1, "--device", "cpu", "--json", *options)
    return msgspec.json.decode(invoke(language, "mismatch", backbone, "--out", out, *arguments), type=Results)


def test_one_command_scores_all_conditions_and_resumes(compared, backbone):
    out, printed = compared
    assert printed == msgspec.json.decode((out / "results.json").read_bytes(), type=Results)
    splits = ("training", "calculator/in_range", "calculator/out_of_range", "calculator/long")
    found = {(row.base, row.merged, row.begin, row.split) for row in printed.rows}
    assert found == {(b, m, n, s) for b in BASES for m in (False, True) for n in BEGINS for s in splits}
    assert {row.items for row in printed.rows} == {18, 20}
    assert printed.agreements == printed.completions == 12 * (18 + 3 * 20)
    report = (out / "report.md").read_text()
    assert printed.verdict in report
    assert "still to be computed" not in report
    assert "![path](path.png)" in report
    assert (out / "path.png").read_bytes().startswith(b"\x89PNG")
    fp32 = {(row.merged, row.begin, row.split): row.values for row in printed.rows if row.base == "fp32"}
    assert all(values == fp32[True, begin, split] for (_, begin, split), values in fp32.items())
    times = {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    assert {path.name for path in times} == {"fp32-seed0.json", "nf4-seed0.json"}
    (lost,) = (path for path in times if "nf4" in path.name)
    lost.unlink()
    assert run(backbone, out, "--no-plots").rows == printed.rows
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == {lost}
    with pytest.raises(UsageError, match="got rank 2, expected rank 3"):
        run(backbone, out, "--rank", 3)
    kept = lost.read_bytes()
    lost.write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"expected a part\. Delete it"):
        read_part(lost, Part)
    lost.write_bytes(kept)


def make_part(base, seed, accuracy):
    """Return a part; ``accuracy`` gives the share of right answers from split, merged and begin."""
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
    return Part(base=base, seed=seed, parameters=1, seconds=1.0, best_epoch=1, scores=tuple(scores))


@pytest.mark.parametrize(
    ("accuracy", "largest"),
    [
        (lambda split, merged, begin: 1.0 - 0.5 * merged, "merging into the FP32 base"),
        (lambda split, merged, begin: 1.0 - 0.5 * (begin != "once"), "the second begin token, places kept"),
        (lambda split, merged, begin: 1.0 - 0.5 * (begin == "twice"), "the places that it moves"),
        (lambda split, merged, begin: 1.0 - 0.5 * (split == "test"), "questions that were not trained on"),
        (lambda split, merged, begin: 0.5, "counting whole completions"),
        (lambda split, merged, begin: 1.0, None),
    ],
)
def test_the_verdict_names_the_step_that_loses_most(accuracy, largest):
    parts = [make_part(base, seed, accuracy) for base in BASES for seed in range(3)]
    summary = Summary(parts, ["test"])
    expected = f"The largest loss is by {largest}." if largest else "No step loses more than chance."
    assert expected in summary.verdict()
    first, *others = summary.path
    assert first.accuracy.value + sum(step.change.value for step in others) == pytest.approx(others[-1].accuracy.value)
    assert summary.agreements == (6 * 2 * 6 * 200, 6 * 2 * 6 * 200)
    effects = {(one.base, one.switch): one.changes["test"] for one in summary.effects}
    assert len(effects) == len(BASES) * len(SWITCHES)
    change = effects["nf4", "merged into the FP32 base"]
    assert change.value == pytest.approx(accuracy("test", True, "once") - accuracy("test", False, "once"))
    low, high = change.interval
    assert low <= change.value <= high


def test_there_is_no_verdict_before_the_nf4_base():
    summary = Summary([make_part("fp32", 0, lambda *_: 0.5)], ["test"])
    assert summary.verdict() == "Nothing is compared yet."
    assert {row.base for row in summary.rows} == {one.base for one in summary.effects} == {"fp32"}
