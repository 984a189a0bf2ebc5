"""Fine-tuned language models: adapters, their base in FP32 or NF4, and the directories that are written."""

import json
import warnings

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import UsageError
from export.commands.language_group import language
from export.errors import CheckpointError
from export.generate.backbone import linear_layers, load_backbone
from export.generate.base import Base
from export.generate.evaluate import completion_limit, encode_fitting, evaluate
from export.generate.files import is_language_model
from export.generate.finetune import Tuning, adapted, finetune
from export.generate.finetuned import merged, moved, trainable
from export.generate.nf4 import BLOCK, LEVELS, nearest, rounded_to_nf4
from export.generate.train import Corpus
from tests.support.language_models import EXAMPLES, bpe, check_tokenizer_is_kept, save_with_chat, tiny_gpt2
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
    model = adapted(base.model, tuning(base=precision), seed=0)
    expected = sum(3 * (layer.weight.shape[0] + layer.weight.shape[1]) for layer in linear_layers(base.model))
    assert trainable(model) == expected
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
    own = {one.metric: one.value for one in measures}
    assert own["cross_entropy"] == pytest.approx(-max(metrics.scores), rel=1e-4)
    found = {one.metric: one.value for one in metrics.measures}
    assert abs(found["cross_entropy"] - own["cross_entropy"]) > 1e-3
    record = json.loads((directory / "training.json").read_text())
    assert record["arguments"]["base"]["sha256"] == base.identity.sha256
    assert record["arguments"]["tuning"] == {"rank": 3, "base": "nf4", "epochs": 2, "rate": 0.1}


def test_an_adapter_moves_to_another_base_and_leaves_both_as_they_are(base):
    model = adapted(base.model, tuning(base="nf4"), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    before, base_before = model(IDS).logits, base.model(IDS).logits
    there_and_back = moved(moved(model, base.model), rounded_to_nf4(base.model))
    torch.testing.assert_close(there_and_back(IDS).logits, before)
    torch.testing.assert_close(merged(model)(IDS).logits, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(base.model(IDS).logits, base_before)


def test_an_interrupted_fine_tuning_resumes_to_the_same_model(base, nf4, tmp_path):
    directory, expected = nf4
    with pytest.raises(KeyboardInterrupt):
        finetune("nf4", base, CORPUS, tuning(base="nf4"), tmp_path / "nf4", seed=0, observer=Seen(stop=2))
    seen = Seen()
    found = finetune("nf4", base, CORPUS, tuning(base="nf4"), tmp_path / "nf4", seed=0, observer=seen)
    assert seen.resumed == [(1, 2)]
    assert (found.scores, found.measures) == (expected.scores, expected.measures)
    weights = [(place / "model.safetensors").read_bytes() for place in (directory, tmp_path / "nf4")]
    assert weights[0] == weights[1]
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
    with pytest.raises(UsageError, match=r"got an existing language model, expected a free path\. Give --replace"):
        invoke(language, *again)
    invoke(language, *again, "--replace")
    data = ("--data", "calculator:in_range", "--limit", 5)
    assert "exact match" in invoke(language, "evaluate", tmp_path / "one", *data)


def test_a_file_of_the_tokenizer_that_cannot_be_read_is_named_before_the_training(tmp_path):
    save_with_chat(tiny_gpt2(), bpe(), tmp_path / "toy")
    (tmp_path / "toy" / "merges.txt").mkdir()
    with pytest.raises(CheckpointError, match=r"toy/merges\.txt: got Is a directory, expected a file that can be read"):
        Base(tmp_path / "toy")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("--rank", 0), SystemExit, "0 is not in the range"),
        (("--rank", 4, "--full"), UsageError, "--rank: got 4, expected adapters. Leave --full or --rank out."),
        (("--full", "--base-precision", "nf4"), UsageError, "--base-precision: got nf4 with --full"),
        (("--backbone", "nowhere"), SystemExit, "Directory 'nowhere' does not exist"),
        (("--backbone", "empty"), CheckpointError, "expected the configuration of a Hugging Face model"),
        (("--out", "BACKBONE"), UsageError, "a path inside of"),
    ],
)
def test_options_that_do_not_fit_are_refused(backbone, tmp_path, options, error, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    given = [str(backbone) if one == "BACKBONE" else str(one) for one in options]
    arguments = ["finetune", "one", "--backbone", str(backbone), "--data", "calculator:train", *given]
    result = CliRunner().invoke(language, arguments)
    assert isinstance(result.exception, error)
    assert message in f"{result.exception} {result.stderr}"
