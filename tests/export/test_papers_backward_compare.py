"""Heads on language models that stay as they are, compared with other methods, and the losses before their use."""

import json
import re
import shutil
from itertools import product

import msgspec
import numpy as np
import pytest
import torch

from edge.bundles.manifest import Measure
from edge.errors import UsageError
from export.cli.language import language
from export.errors import CheckpointError, DataError
from export.generate.decoding import complete
from export.generate.evaluate import evaluate, teacher_forced, token_measures
from export.generate.finetune import trainable, unfrozen, with_lora
from export.generate.formats import Example, Source, parse_answer, read_source, same_answer
from export.generate.model import Base, LastStates, identity_of, positions_of, save_backbone
from export.generate.tokenizer import train_characters
from export.generate.train import read_corpus
from export.papers.backward.calculators import CalculatorRecord
from export.papers.backward.methods import ADAPTER, FROZEN, GROUPS, HEAD, METHODS, RULES, SHOWN, read_task, shown
from export.papers.backward.mismatch import BEGINS, AdapterRecord, Mismatch, MismatchSettings, begin_of, moved_back
from export.papers.backward.run import ComparisonSettings, HeadComparison
from export.papers.backward.scores import MethodRecord
from export.papers.backward.tables import further, metrics_of
from export.papers.backward.training import LowRankAdapter, Temperature, load_head, new_head, train_head
from export.papers.experiment import read_records, read_settings
from export.training.objective import Observer
from export.training.provenance import processor
from export.training.runs import read_config
from tests.support.language_models import bpe, tiny_gpt2, tiny_of
from tests.support.task_data import invoke

WIDTH, LAYERS, POSITIONS = 16, 2, 40


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Directory of a module with sums modulo 10, in two training splits and a test split."""
    place = tmp_path_factory.mktemp("mathematics")
    generator = np.random.default_rng(0)
    pairs = [divmod(int(number), 30) for number in generator.permutation(900)]
    for split, some in (("train-easy", pairs[:60]), ("train-hard", pairs[60:120]), ("interpolate", pairs[120:150])):
        path = place / split / "sums.txt"
        path.parent.mkdir()
        path.write_text("".join(f"{a} and {b}?\n{(a + b) % 10}\n" for a, b in some))
    return place


@pytest.fixture(scope="module")
def tokenizer(data):
    return train_characters(["Question: \nAnswer: #### ?and0123456789"])


@pytest.fixture(scope="module")
def backbone(data, tokenizer, tmp_path_factory):
    return write_backbone(tmp_path_factory.mktemp("models") / "toy", tokenizer, seed=0)


@pytest.fixture(scope="module")
def base(backbone):
    return Base(backbone)


def write_backbone(path, tokenizer, *, seed):
    save_backbone(tiny_gpt2(seed, POSITIONS, tokenizer), tokenizer, path)
    return path


def of_architecture(kind, path, tokenizer):
    save_backbone(tiny_of(kind, tokenizer, POSITIONS), tokenizer, path)
    return Base(path)


def random_adapter(base, rank=3):
    torch.manual_seed(1)
    adapter = LowRankAdapter(base.vocabulary, base.width, rank)
    torch.nn.init.normal_(adapter.up)
    return adapter


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_a_revised_model_has_the_logits_of_the_module_and_is_itself_again(kind, base, tokenizer, tmp_path):
    base = base if kind == "gpt2" else of_architecture(kind, tmp_path / kind, tokenizer)
    ids = torch.arange(12).reshape(2, 6)
    adapter = random_adapter(base)
    with torch.no_grad():
        before = base.model(ids).logits
        states = LastStates(base.model)(ids)
        torch.testing.assert_close(base.read_out.logits(states), before)
        with base.revised(Temperature()) as model:
            torch.testing.assert_close(model(ids).logits, before)
        with base.revised(adapter) as model:
            expected = before + states @ adapter.down.T @ adapter.up.T
            torch.testing.assert_close(model(ids).logits, expected)
        assert torch.equal(base.model(ids).logits, before)


def test_lora_trains_queries_keys_and_values_alone_and_starts_as_the_model(base, tokenizer, tmp_path):
    adapted = with_lora(base.model, 2, seed=0)
    assert trainable(adapted) == 2 * LAYERS * (WIDTH + 3 * WIDTH)
    assert {name.split(".")[-3] for name, p in adapted.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    ids = torch.arange(6)[None]
    torch.testing.assert_close(adapted(ids).logits, base.model(ids).logits)
    assert trainable(base.model) == 0
    assert trainable(unfrozen(base.model)) == base.model.num_parameters()
    layer = adapted.transformer.h[0].attn.c_attn
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(up)
    states = torch.randn(3, WIDTH)
    torch.testing.assert_close(layer(states), layer.base_layer(states) + states @ down.T @ up.T)
    llama = of_architecture("llama", tmp_path / "llama", tokenizer)
    assert trainable(with_lora(llama.model, 1, seed=0)) == 2 * (3 * 32 + 64 + 32 + 32)


def test_the_command_trains_heads_that_know_their_model(base, backbone, data, tokenizer, tmp_path):
    out = tmp_path / "head"
    arguments = ("head", backbone, "--data", f"mathematics:{data}/train-easy", "--dims", 4, "--heads", 2)
    arguments += ("--layers", 2, "--steps", 20, "--seeds", 2, "--out", out, "--json")
    printed = json.loads(invoke(language, *arguments))
    assert printed["base"] == msgspec.to_builtins(identity_of(backbone))
    names = {measure["metric"] for measure in printed["metrics"]["measures"]}
    assert names >= {"cross_entropy", "perplexity", "exact_match", "unparsable", "token_f1"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"head-seed0", "head-seed1"}
    heads = [load_head(tmp_path / f"head-seed{seed}", base) for seed in range(2)]
    assert (heads[0].config.heads, heads[0].config.layers) == (2, 2)
    assert not torch.equal(heads[0].layers[0].key, heads[1].layers[0].key)
    assert all(layer.alpha != 0 for head in heads for layer in head.layers)
    assert read_config(tmp_path / "head-seed1").arguments["base"] == printed["base"]
    examples = ("--data", f"mathematics:{data / 'interpolate'}", "--limit", 10, "--json")
    measured = json.loads(invoke(language, "evaluate", backbone, "--head", tmp_path / "head-seed0", *examples))
    with base.revised(heads[0]) as model:
        ((split, asked),) = read_source(Source("mathematics", str(data / "interpolate")), 10).items()
        expected = evaluate(model, base.tokenizer, split, asked, max_tokens=512)
    assert msgspec.convert(measured["measures"], tuple[Measure, ...]) == expected
    assert expected != evaluate(base.model, base.tokenizer, split, asked, max_tokens=512)
    log = (tmp_path / "head-seed0" / "log.jsonl").read_text()
    assert "cross-entropy" in log
    with pytest.raises(UsageError, match=r"head-seed0: got an existing run, expected a free path"):
        invoke(language, *arguments)
    with pytest.raises(UsageError, match=r"--dims: got 4, expected no --bias beside it\. Leave --dims or"):
        invoke(language, *arguments, "--bias", "--replace")
    other = Base(write_backbone(tmp_path / "other", tokenizer, seed=1))
    with pytest.raises(CheckpointError, match=r"head .*: got a head of toy with SHA-256 .*, expected a head of other"):
        load_head(tmp_path / "head-seed0", other)


def test_an_interrupted_head_ends_with_the_same_weights(base, data, tmp_path):
    class Interrupted(Observer):
        def on_epoch(self, epoch):
            if epoch.number == 2:
                raise KeyboardInterrupt

    corpus = read_corpus([Source("mathematics", str(data / "train-easy"))], seed=0)

    def train(name, **options):
        head = new_head(base, 0, dims=4)
        metrics = train_head(head, base, corpus, tmp_path / name, seed=0, steps=8, **options)
        return metrics, head.state_dict()

    expected, weights = train("whole")
    assert expected.epochs > 3
    with pytest.raises(KeyboardInterrupt):
        train("resumed", observer=Interrupted())
    found, resumed = train("resumed")
    assert (found.scores, found.measures) == (expected.scores, expected.measures)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_identity_of_a_model_follows_from_each_file_that_decides_its_states(backbone, tmp_path, file):
    copy = shutil.copytree(backbone, tmp_path / backbone.name)
    assert identity_of(copy) == identity_of(backbone)
    (copy / file).write_bytes((copy / file).read_bytes() + b" ")
    assert identity_of(copy) != identity_of(backbone)


def test_a_head_of_a_malformed_shape_or_without_its_model_is_refused(base, backbone, data, tmp_path):
    out = tmp_path / "head"
    source = "calculator:train"
    invoke(language, "head", backbone, "--data", source, "--limit", 20, "--steps", 1, "--out", out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["arguments"]["config"]["dims"] = "six"
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="field arguments: got Expected `int`, got `str`"):
        load_head(out, base)
    del config["arguments"]["base"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected the identity of its language model"):
        load_head(out, base)


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


def test_a_task_has_a_test_split_and_training_splits_apart(base, data, tokenizer):
    task = read_task(data / "sums", tokenizer, POSITIONS, 50)
    assert (len(task.train), len(task.holdout), len(task.test)) == (50, 12, 30)
    assert task.test[0].prompt == (data / "interpolate" / "sums.txt").read_text().splitlines()[0]
    tokens = [{tuple(row.ids.tolist()) for row in rows} for rows in (task.train, task.holdout)]
    assert not tokens[0] & tokens[1]
    assert len(read_task(data / "sums", tokenizer, 35, 50).test) < 30
    with pytest.raises(DataError, match=r"got no training split, expected .*train\*/products.txt"):
        read_task(data / "products", tokenizer, POSITIONS, 50)


def test_questions_of_the_test_split_are_not_trained_on(tokenizer, tmp_path):
    for split, numbers in (("train", range(40)), ("interpolate", range(30, 50))):
        (tmp_path / split).mkdir()
        lines = [f"{number} and 0?\n{number % 10}\n" for number in numbers]
        (tmp_path / split / "sums.txt").write_text("".join(lines))
    task = read_task(tmp_path / "sums", tokenizer, POSITIONS, 40)
    known = sorted(tokenizer.decode(row.ids) for row in (*task.train, *task.holdout))
    assert known == sorted(
        tokenizer.decode(tokenizer.encode(Example(f"{a} and 0?", "", str(a % 10))).ids) for a in range(30)
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
