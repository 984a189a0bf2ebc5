"""Fine-tuned language models: adapters, their base in FP32 or NF4, and the directories that are written."""

import json
import warnings
from pathlib import Path
from shutil import copytree

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.errors import FewheadsError, UsageError
from export.cli.language import language
from export.generate.decoding import complete
from export.generate.evaluate import completion_limit, encode_fitting, evaluate
from export.generate.files import is_language_model
from export.generate.finetune import (
    BLOCK,
    LEVELS,
    Tuning,
    adapted,
    finetune,
    merged,
    moved,
    nearest,
    rounded_to_nf4,
    trainable,
)
from export.generate.model import Base, linear_layers, load_backbone, save_backbone
from export.generate.train import Corpus, preset_of, train_language
from export.training.objective import SILENT
from tests.support.language_models import (
    EXAMPLES,
    bpe,
    characters,
    check_tokenizer_is_kept,
    save_with_chat,
    tiny_gpt2,
)
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import Seen, invoke

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CORPUS = Corpus(EXAMPLES[4:], EXAMPLES[:4], "sums")
IDS = torch.arange(20).reshape(2, 10)
#: Of the paper's appendix E.
PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def tuning(**changes):
    return Tuning(**{"rank": 3, "epochs": 2, "rate": 1e-1, **changes})


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "toy"
    save_with_chat(tiny_gpt2(), bpe(), path)
    return path


@pytest.fixture(scope="module")
def base(backbone):
    return Base(backbone)


@pytest.fixture(scope="module")
def nf4(base, tmp_path_factory):
    """Directory of a model that was fine-tuned on the NF4 base, and its metrics."""
    directory = tmp_path_factory.mktemp("tuned") / "nf4"
    return directory, finetune("nf4", base, CORPUS, tuning(base="nf4"), directory, seed=0)


def with_adapter(model, directory):
    """Return a copy of a model with the adapter of a directory, read by peft itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.PeftModel.from_pretrained(model, directory / "adapter")


def test_levels_are_the_published_ones():
    torch.testing.assert_close(LEVELS, torch.tensor(PUBLISHED), rtol=0, atol=2e-7)


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False), min_size=1, max_size=150))
def test_weights_become_the_nearest_level_of_their_block(values):
    weights = torch.tensor(values)
    rounded = nearest(weights)
    for block, found in zip(weights.split(BLOCK), rounded.split(BLOCK), strict=True):
        levels = LEVELS * block.abs().max()
        distances = (block[:, None] - levels).abs()
        assert torch.isin(found, levels).all()
        # A weight between two levels may become either.
        assert ((block - found).abs() <= distances.min(dim=1).values * (1 + 1e-5) + 1e-37).all()
    assert torch.equal(nearest(rounded), rounded)


def test_only_linear_layers_are_rounded_along_their_inputs(base):
    rounded = rounded_to_nf4(base.model)
    changed = {name for name, p in rounded.named_parameters() if not torch.equal(p, base.model.get_parameter(name))}
    assert changed == {f"transformer.h.{layer}.{name}.weight" for layer in (0, 1) for name in (
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}  # fmt: skip
    matrix, found = (model.transformer.h[0].mlp.c_fc.weight for model in (base.model, rounded))  # [in 16, out 64]
    assert torch.equal(found[:, :4], nearest(matrix[:, :4].T.contiguous()).T)  # four outputs of 16 inputs are a block


@pytest.mark.parametrize("precision", ["fp32", "nf4"])
def test_adapters_are_on_all_linear_layers_and_train_alone(base, precision):
    drawn = torch.get_rng_state()
    model = adapted(base.model, tuning(base=precision), seed=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert trainable(model) == sum(3 * sum(layer.weight.shape) for layer in linear_layers(base.model))
    assert all("lora" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    start = rounded_to_nf4(base.model) if precision == "nf4" else base.model
    torch.testing.assert_close(model(IDS).logits, start(IDS).logits)


def test_the_directory_is_the_fp32_base_with_the_adapter_in_it(backbone, base, nf4):
    directory, metrics = nf4
    assert is_language_model(directory)
    model = load_backbone(directory)
    apart = with_adapter(load_backbone(backbone), directory)
    torch.testing.assert_close(model(IDS).logits, apart(IDS).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(IDS).logits, base.model(IDS).logits, atol=0.1)
    limit = completion_limit(encode_fitting(bpe(), CORPUS.train, 64))
    assert metrics.measures == evaluate(model, bpe(), "holdout", CORPUS.holdout, max_tokens=limit)
    # The training saw another base, so its scores are not those of the result.
    on_its_own = with_adapter(rounded_to_nf4(load_backbone(backbone)), directory)
    measures = evaluate(merged(on_its_own), bpe(), "holdout", CORPUS.holdout, max_tokens=limit)
    own = {of.metric: of.value for of in measures}
    assert own["cross_entropy"] == pytest.approx(-max(metrics.scores), rel=1e-4)
    values = {of.metric: of.value for of in metrics.measures}
    assert abs(values["cross_entropy"] - own["cross_entropy"]) > 1e-3
    record = json.loads((directory / "training.json").read_text())
    assert record["arguments"]["base"]["sha256"] == base.identity.sha256
    assert record["arguments"]["tuning"] == {"rank": 3, "base": "nf4", "epochs": 2, "rate": 0.1, "precision": "fp32"}


def test_an_adapter_moves_to_another_base_and_leaves_both_as_they_are(base):
    model = adapted(base.model, tuning(base="nf4"), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    before, base_before = model(IDS).logits, base.model(IDS).logits
    back = moved(moved(model, base.model), rounded_to_nf4(base.model))
    torch.testing.assert_close(back(IDS).logits, before)
    torch.testing.assert_close(merged(model)(IDS).logits, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(base.model(IDS).logits, base_before)


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_an_interrupted_training_resumes_to_the_same_model(kind, base, nf4, tmp_path):
    def run(directory, observer=SILENT):
        torch.rand(1)  # the seed alone decides, whatever was drawn before
        if kind == "adapters":
            return finetune("nf4", base, CORPUS, tuning(base="nf4"), directory, seed=0, observer=observer)
        preset = preset_of("tiny", steps=2)
        preset = replace(preset, recipe=replace(preset.recipe, epochs=2, batch_size=8))
        return train_language("one", CORPUS, bpe(), preset, directory, seed=0, observer=observer)

    directory, expected = nf4 if kind == "adapters" else (tmp_path / "one", run(tmp_path / "one"))
    again, seen = tmp_path / "again", Seen()
    with pytest.raises(KeyboardInterrupt):
        run(again, Seen(stop=2))
    assert not again.exists()
    resumed = run(again, seen)
    assert seen.resumed == [(1, 2)]
    assert (resumed.scores, resumed.losses, resumed.measures) == (expected.scores, expected.losses, expected.measures)
    assert (again / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_the_command_writes_a_backbone_for_the_others(backbone, tmp_path):
    arguments = ("--data", "calculator:train", "--limit", 40, "--epochs", 1, "--out", tmp_path, "--device", "cpu")
    printed = json.loads(invoke(language, "finetune", "one", "--backbone", backbone, *arguments, "--json"))
    assert printed["base"]["name"] == "toy"
    again = ("finetune", "two", "--backbone", tmp_path / "one", *arguments, "--full")
    assert "perplexity" in invoke(language, *again)
    assert is_language_model(tmp_path / "two")
    assert not (tmp_path / "two" / "adapter").exists()
    for name in ("one", "two"):
        check_tokenizer_is_kept(backbone, tmp_path / name)
    with pytest.raises(UsageError, match=r"an existing model of fewheads language, .* free path\. Give --replace"):
        invoke(language, *again)
    invoke(language, *again, "--replace")
    data = ("--data", "calculator:in_range", "--limit", 5)
    assert "exact match" in invoke(language, "evaluate", tmp_path / "one", *data)


@pytest.mark.slow
def test_models_with_merged_adapters_or_all_weights_trained_are_served_with_the_texts_of_torch(tmp_path):
    save_backbone(tiny_gpt2(tokenizer=characters(), layers=1), characters(), tmp_path / "base")
    (tmp_path / "sums.txt").write_text("".join(f"{one.prompt}\n{one.answer}\n" for one in EXAMPLES))
    data = ("--backbone", tmp_path / "base", "--data", f"mathematics:{tmp_path}/sums.txt", "--out", tmp_path)
    names, asked, most = ("adapters", "whole"), EXAMPLES[::5], 8
    for name, way in zip(names, ((), ("--full",)), strict=True):
        invoke(language, "finetune", name, *data, "--epochs", 20, "--lr", 1e-2, *way)
        invoke(language, "export", tmp_path / name, "--name", name, "--repository", tmp_path)
    prompts, sent = [one.prompt for one in asked], {"prompt": column(*(one.text_before for one in asked))}
    models = [load_backbone(tmp_path / name) for name in ("base", *names)]
    untuned, *tuned = [complete(model, characters(), prompts, most) for model in models]
    with served_bundles([tmp_path / f"{name}-1" for name in names], tmp_path / "cache") as ask:
        answers = [ask(name, sent, ["text"], max_tokens=most)["text"][:, 0] for name in names]
    assert [[text.decode() for text in texts] for texts in answers] == tuned
    assert untuned != tuned[0] != tuned[1] != untuned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train a/b", "NAME: got 'a/b', expected lower-case letters"),
        ("train a --data calculator", "--data: got 'calculator', expected FORMAT:PATH"),
        ("train a --tokenizer characters --vocabulary 9", "--vocabulary: got 9, expected --tokenizer bpe. Leave --voc"),
        ("train sums --replace", "got something that is not a model of fewheads language"),
        ("train made --tokenizer made --replace", "got the path of --tokenizer made, expected a path apart"),
        ("train sums --data mathematics:sums/notes.txt", "a directory that holds"),
        ("evaluate toy --top-k 5", "--top-k: got 5, expected --temperature above 0 beside it"),
        ("finetune one --backbone toy --rank 0", "0 is not in the range"),
        ("finetune one --backbone toy --rank 4 --full", "--rank: got 4, expected adapters. Leave --full or --rank"),
        ("finetune one --backbone toy --full --base-precision nf4", "--base-precision: got nf4 with --full"),
        ("finetune one --backbone nowhere", "Directory 'nowhere' does not exist"),
        ("finetune one --backbone empty", "expected the configuration of a Hugging Face model"),
        ("finetune one --backbone broken", "broken/merges.txt: got Is a directory, expected a file that can be read"),
        ("finetune one --backbone toy --out toy", "a path inside of"),
        ("finetune made --backbone made --replace", "got the path of --backbone made, expected a path apart"),
        ("reduce toy --heads 0.25", "--heads: got 0.25, expected 0.5 to 1, because each layer keeps at least 1 of 2"),
        ("reduce toy --neurons 0.01", "got 0.01, expected 0.125 to 1, because each layer keeps at least 8 of 64"),
        ("reduce toy", "--heads and --neurons: got 1 and 1, expected shares that remove something"),
        ("reduce toy --heads 1.5", "1.5 is not in the range"),
        ("reduce toy --heads 0.5 --texts 1", "tokens in 1 texts, expected more than 64"),
        ("reduce single --heads 0.5", "--heads: got 0.5, expected 1 to 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message, backbone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("toy", "broken", "made"):
        copytree(backbone, name)
    for name in ("training.json", "metrics.json", "log.jsonl"):
        Path("made", name).touch()
    save_backbone(tiny_gpt2(heads=1), bpe(), "single")
    for name in ("broken/merges.txt", "empty", "sums"):
        Path(name).mkdir()
    Path("sums/notes.txt").write_text("mine")
    data = [] if "--data" in arguments else ["--data", "calculator:train", "--limit", "80"]
    command = arguments.split()
    out = {"evaluate": [], "reduce": ["--out", "one"]}.get(command[0], ["--out", "."])
    result = CliRunner().invoke(language, [*command, *data, *([] if "--out" in command else out)])
    assert isinstance(result.exception, (FewheadsError, SystemExit))
    assert message in f"{result.exception} {result.stderr}"
    assert not Path("one").exists()
