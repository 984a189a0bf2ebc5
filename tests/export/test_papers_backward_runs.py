"""Heads and adapters on language models that stay as they are, and the runs of heads."""

import json
import shutil

import msgspec
import pytest
import torch

from edge.bundles.manifest import Measure
from edge.errors import UsageError
from export.cli.language import language
from export.errors import CheckpointError
from export.generate.evaluate import evaluate
from export.generate.finetune import trainable, unfrozen, with_lora
from export.generate.formats import Source, read_source
from export.generate.model import Base, LastStates, identity_of, save_backbone
from export.generate.train import read_corpus
from export.papers.backward.training import LowRankAdapter, Temperature, load_head, new_head, train_head
from export.training.objective import Observer
from export.training.runs import read_config
from tests.support.language_models import tiny_of
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


def of_architecture(kind, path):
    save_backbone(tiny_of(kind, sums_tokenizer(), POSITIONS), sums_tokenizer(), path)
    return Base(path)


def random_adapter(base, rank=3):
    torch.manual_seed(1)
    adapter = LowRankAdapter(base.vocabulary, base.width, rank)
    torch.nn.init.normal_(adapter.up)
    return adapter


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_a_revised_model_has_the_logits_of_the_module_and_is_itself_again(kind, base, tmp_path):
    base = base if kind == "gpt2" else of_architecture(kind, tmp_path / kind)
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


def test_lora_trains_queries_keys_and_values_alone_and_starts_as_the_model(base, tmp_path):
    adapted = with_lora(base.model, 2, seed=0)
    assert trainable(adapted) == 2 * 2 * (16 + 3 * 16)
    assert {name.split(".")[-3] for name, p in adapted.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    ids = torch.arange(6)[None]
    torch.testing.assert_close(adapted(ids).logits, base.model(ids).logits)
    assert trainable(base.model) == 0
    assert trainable(unfrozen(base.model)) == base.model.num_parameters()
    layer = adapted.transformer.h[0].attn.c_attn
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(up)
    states = torch.randn(3, 16)
    torch.testing.assert_close(layer(states), layer.base_layer(states) + states @ down.T @ up.T)
    llama = of_architecture("llama", tmp_path / "llama")
    assert trainable(with_lora(llama.model, 1, seed=0)) == 2 * (3 * 32 + 64 + 32 + 32)


def test_the_command_trains_heads_that_know_their_model(base, backbone, data, tmp_path):
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
    other = Base(write_backbone(tmp_path / "other", seed=1))
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
