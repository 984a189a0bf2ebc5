"""``fewheads language compare``: methods, tasks, rules to choose tokens, and few examples."""

import json
import re
import shutil
from itertools import product

import msgspec
import numpy as np
import pytest
import torch

from edge.errors import UsageError
from export.cli.language import language
from export.errors import DataError
from export.generate.decoding import complete
from export.generate.evaluate import teacher_forced, token_measures
from export.generate.finetune import trainable, with_lora
from export.generate.formats import Example, parse_answer, same_answer
from export.generate.model import Base, positions_of
from export.papers.backward.methods import ADAPTER, FROZEN, GROUPS, HEAD, METHODS, RULES, SHOWN, read_task, shown
from export.papers.backward.run import ComparisonSettings, HeadComparison
from export.papers.backward.scores import MethodRecord
from export.papers.backward.tables import further, metrics_of
from export.papers.experiment import read_records
from export.training.provenance import processor
from tests.support.sums import POSITIONS, sums_tokenizer, write_backbone, write_sums
from tests.support.task_data import invoke


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("mathematics"))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return write_backbone(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="module")
def base(backbone):
    return Base(backbone)


def test_methods_start_from_the_model_and_have_about_equal_parameters(base):
    ids = torch.arange(6)[None]
    expected = base.model(ids).logits
    counts = {}
    for method in METHODS.values():
        module = method.make(base, 0) if method.make else None
        counts[method.name] = trainable(module) if module else 0
        with method.applied(base, module) as model, torch.no_grad():
            logits = model(ids).logits
        if "no residual" in method.name:
            assert logits.std() > 0  # else no layer would have a gradient
        elif "literal" in method.name:
            torch.testing.assert_close(logits.sum(dim=2), torch.ones(1, 6))
        else:
            torch.testing.assert_close(logits, expected)
    assert counts[ADAPTER.name] == pytest.approx(counts[HEAD.name], rel=0.02)
    assert abs(counts["LoRA"] - counts[HEAD.name]) <= trainable(with_lora(base.model, 1, 0)) / 2


def test_a_task_has_a_test_split_and_training_splits_apart(base, data):
    task = read_task(data / "sums", sums_tokenizer(), POSITIONS, 50)
    assert (len(task.train), len(task.holdout), len(task.test)) == (50, 12, 30)
    assert task.test[0].prompt == (data / "interpolate" / "sums.txt").read_text().splitlines()[0]
    tokens = [{tuple(row.ids.tolist()) for row in rows} for rows in (task.train, task.holdout)]
    assert not tokens[0] & tokens[1]
    assert len(read_task(data / "sums", sums_tokenizer(), 35, 50).test) < 30
    with pytest.raises(DataError, match=r"got no training split, expected .*train\*/products.txt"):
        read_task(data / "products", sums_tokenizer(), POSITIONS, 50)


def test_questions_of_the_test_split_are_not_trained_on(tmp_path):
    for split, numbers in (("train", range(40)), ("interpolate", range(30, 50))):
        (tmp_path / split).mkdir()
        lines = [f"{number} and 0?\n{number % 10}\n" for number in numbers]
        (tmp_path / split / "sums.txt").write_text("".join(lines))
    task = read_task(tmp_path / "sums", sums_tokenizer(), POSITIONS, 40)
    known = sorted(sums_tokenizer().decode(row.ids) for row in (*task.train, *task.holdout))
    assert known == sorted(
        sums_tokenizer().decode(sums_tokenizer().encode(Example(f"{a} and 0?", "", str(a % 10))).ids) for a in range(30)
    )


def test_an_epoch_of_each_method_has_each_example_once(base, data, tmp_path):
    task = read_task(data / "sums", base.tokenizer, POSITIONS, 40)
    values = {"data": {"sums": ""}, "limit": 40, "epochs": 1, "items": 2, "seeds": 1, "processor": processor()}
    experiment = HeadComparison(ComparisonSettings(base=base.identity, **values), tmp_path, base, {"sums": task})
    (learnt,) = {int(row.learnt[1:].sum()) for row in task.train}
    for method, examples in product((of for of in METHODS.values() if of.make), (40, 8)):
        objective, passes = experiment.objective("sums", method, method.make(base, 0), 0, examples)
        batches = list(objective.batches(0, 0))
        tokens = [batch.learnt[:, 1:].sum() if method.of_model else len(batch.targets) for batch in batches]
        assert sum(tokens) == learnt * examples
        assert passes == (1 if examples == 40 else 100)
        assert len(batches) == objective.steps_per_epoch == (1 if examples == 8 else 2)


@pytest.fixture(scope="module")
def compared(backbone, data, tmp_path_factory):
    """Directory of a comparison with two seeds, and what the command printed."""
    out = tmp_path_factory.mktemp("compared") / "out"
    return out, comparison(backbone, data, out)


def comparison(backbone, data, out, *options, seeds=2):
    arguments = ("--limit", 40, "--epochs", 1, "--items", 10, "--seeds", seeds, "--out", out, "--json", *options)
    return json.loads(invoke(language, "compare", backbone, "--data", data / "sums", *arguments))


def test_one_command_compares_all_methods_and_resumes(compared, backbone, base, data):
    out, printed = compared
    losses, right, rates, flips, f1, *_ = ({row[0]: row[1:] for row in table["rows"]} for table in printed["tables"])
    assert [name for name in losses if name in METHODS] == list(GROUPS["trained"])
    assert printed["text"].partition("\n")[0] in (out / "report.md").read_text()
    assert not any((out / "unfinished").iterdir())
    records = read_records(out, MethodRecord)
    tried, kept = (records[f"sums-backward-attention-seed{seed}"] for seed in range(2))
    best = min(tried.holdout, key=tried.holdout.get)
    assert (len(tried.holdout), [*kept.holdout], tried.rate, rates[HEAD.name]) == (5, [best], float(best), [tried.rate])
    frozen, head = (np.array(records[f"sums-{name}-seed0"].right) for name in ("frozen-model", "backward-attention"))
    assert flips == {"sums": [10, int((head & ~frozen).sum()), int((frozen & ~head).sum())]}
    assert right[FROZEN.name][1]["value"] == pytest.approx(100 * frozen.mean())
    forced = teacher_forced(base.model, read_task(data / "sums", base.tokenizer, POSITIONS, 40).test_rows)
    assert losses[FROZEN.name][1]["value"] == pytest.approx(forced.losses.mean(), abs=1e-5)
    (expected,) = (measure.value for measure in token_measures("test", forced) if measure.metric == "token_f1")
    assert f1[FROZEN.name][0]["value"] == pytest.approx(expected)
    lines = (out / "records.jsonl").read_text().splitlines()
    (out / "records.jsonl").write_text("".join(f"{line}\n" for line in lines if "sums-LoRA-seed1" not in line))
    assert comparison(backbone, data, out)["tables"] == printed["tables"]
    with pytest.raises(UsageError, match="got items 10, expected items 11"):
        comparison(backbone, data, out, "--items", 11)
    with pytest.raises(UsageError, match="--data: got 'sums, sums', expected modules of different names"):
        comparison(backbone, data, out, "--data", data / "sums")
    with pytest.raises(UsageError, match="--fewer: got 40, expected less than the --limit of 40"):
        comparison(backbone, data, out, "--fewer", 40)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Directory of a model that has learnt what an answer looks like, with room for two examples in a prompt."""
    out = tmp_path_factory.mktemp("trained")
    source = f"mathematics:{data / 'train-easy'}"
    options = ("--size", "tiny", "--tokenizer", "characters", "--steps", 100, "--out", out)
    invoke(language, "train", "tiny", "--data", source, *options, "--device", "cpu", "--json")
    return out / "tiny"


@pytest.fixture(scope="module")
def few(trained, data, tmp_path_factory):
    """Directory and tables of a comparison of rules and of methods on few examples, and its task."""
    out = tmp_path_factory.mktemp("few") / "out"
    options = ("--methods", "few", "--methods", "rules", "--fewer", 8, "--lr", 0.01, "--items", 30)
    tables = {table["title"]: table["rows"] for table in comparison(trained, data, out, *options)["tables"]}
    base = Base(trained)
    return out, tables, base, read_task(data / "sums", base.tokenizer, positions_of(base.model), 40)


def test_rules_choose_the_tokens_of_the_frozen_model(few):
    out, tables, base, task = few
    records, prompts = read_records(out, MethodRecord), [example.prompt for example in task.test]
    found = {}
    for rule, seed in product((FROZEN, *RULES), range(2)):
        name = f"sums-{re.sub('[^a-zA-Z0-9.]+', '-', rule.name)}-seed{seed}"
        decoding = msgspec.structs.replace(rule.decoding, seed=seed)
        texts = complete(base.model, base.tokenizer, prompts, 8 * 5 // 4, decoding, batch_size=100)
        right = [same_answer(parse_answer(text), of.answer) for text, of in zip(texts, task.test, strict=True)]
        assert (name in records) is (seed == 0 or rule.decoding.temperature > 0)
        if name in records:
            found[rule.name, seed] = records[name].right
            assert records[name].right == tuple(right)
            assert (records[name].losses == ()) is (rule is not FROZEN)
    assert len({*found.values()}) > 2
    losses, right = (
        {row[0] for row in tables[title]} for title in ("Cross-entropy, nats per token", "Right answers, %")
    )
    rules = {rule.name for rule in RULES}
    assert rules <= right
    assert {f"the head minus: {name}" for name in rules} <= right
    assert not rules & losses


def test_few_examples_are_in_the_prompt_or_trained_on(few, tmp_path):
    out, tables, base, task = few
    records = read_records(out, MethodRecord)
    names = {name for name in records if name.endswith("-8-examples")}
    learning = [METHODS[name] for name in GROUPS["few"] if METHODS[name].learns]
    assert len(names) == 2 * len(learning)
    drawn = []
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(task.train))[:8]
        before = shown(base, task, [task.train[row] for row in order])
        drawn.append(base.tokenizer.decode(before.begin))
        record = records[f"sums-frozen-model-examples-in-the-prompt-seed{seed}-8-examples"]
        assert record.shown == before.examples == 2 == drawn[-1].count("Question: ")
        example = task.test[0]
        ids = base.tokenizer.tokenizer.encode(f"{drawn[-1]}{example.text_before}{example.completion}").ids
        ids = torch.tensor([[*ids, base.tokenizer.end]])
        logits, learnt = base.model(ids).logits[0], int(task.test_rows[0].learnt.sum())
        loss = torch.nn.functional.cross_entropy(logits[-learnt - 1 : -1], ids[0, -learnt:], reduction="sum")
        assert record.losses[0] == pytest.approx(float(loss), abs=1e-3)
    assert drawn[0] != drawn[1]
    rows = tables["Cross-entropy, nats per token, by examples"]
    losses = {row[1]: row[3] for row in rows if row[0] == 8}
    assert {FROZEN.name, SHOWN.name, HEAD.name, f"the head minus: {SHOWN.name}"} <= losses.keys()
    records_of = [records[f"sums-backward-attention-seed{seed}-8-examples"] for seed in range(2)]
    means = [sum(record.losses) / sum(record.tokens) for record in records_of]
    assert losses[HEAD.name]["value"] == pytest.approx(np.mean(means))
    shutil.copytree(out, tmp_path / "unseen")
    (report,) = further(tmp_path).values()
    of_losses, of_answers = metrics_of(report)
    assert [row[0] for row in of_losses.rows] == 7 * [8] + 6 * [40]
    assert {row[1] for row in of_losses.rows} == {*GROUPS["few"]}
    assert {row[1] for row in of_answers.rows} == {*GROUPS["few"], *GROUPS["rules"]}
