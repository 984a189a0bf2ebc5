"""Reduced language models: what is removed, what the rest is fitted to, and that an export drops it."""

import copy
import json
from itertools import product

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from export.commands.language_group import language
from export.errors import CheckpointError, ReductionError
from export.generate.backbone import load_backbone
from export.generate.bundle import export_language_model
from export.generate.calibration import Calibration
from export.generate.decoder import DecoderGraph
from export.generate.files import is_language_model
from export.generate.parts import attention_of, layers_of
from export.generate.ranking import kept_counts
from export.generate.reduce import Shares, reduce_model
from export.reduce.algebra import Removal
from export.reduce.states import recorded
from tests.support.language_models import (
    EXAMPLES,
    bpe,
    characters,
    check_tokenizer_is_kept,
    save_with_chat,
    tiny_gpt2,
)

transformers = pytest.importorskip("transformers")

ROWS = [bpe().encode(one) for one in EXAMPLES]
HALF = Shares(heads=0.75, neurons=0.5)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def random_model(kind, config, **changes):
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "initializer_range": 0.3, **changes}
    return kind(config(vocab_size=bpe().size, **sizes)).eval()


def llama(**changes):
    """Return a model in which two heads of queries share one of keys and values, without biases."""
    return random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig, **changes)


def gemma():
    """Return a model with normalised heads, a window, and heads that are together wider than the model."""
    sizes = {"head_dim": 16, "sliding_window": 3, "layer_types": None, "sliding_window_pattern": 2}
    return random_model(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, **sizes)


@pytest.mark.parametrize("made", [tiny_gpt2, llama, gemma])
def test_a_graph_without_the_removed_heads_and_neurons_computes_the_logits_of_the_model_with_zeros(made):
    model = made()
    whole = model.num_parameters()
    layers, parameters = reduce_model(model, ROWS, HALF)
    heads = tuple(len(layer.heads) for layer in layers)
    assert sorted(heads) == [1, 2]
    assert model.num_parameters() == whole
    ids = torch.from_numpy(ROWS[0].ids.astype(np.int64))[None]
    last = torch.tensor([[ids.shape[1] - 1]])
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        graph = DecoderGraph(copy.deepcopy(model))
        nothing = [torch.zeros(1, heads, 1, graph.width) for _, _, heads in graph.caches()]
        logits, *new = graph(ids, torch.zeros(1, 1, dtype=torch.int64), last, *nothing)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert graph.key_heads == heads
    assert [one.shape[1] for one in new] == [heads[0], heads[0], heads[1], heads[1]]
    assert graph.model.num_parameters() == parameters < whole


@pytest.mark.parametrize("made", [tiny_gpt2, llama])
def test_reported_errors_are_those_of_the_outputs_and_less_than_without_a_fit(made):
    found = {}
    for method in ("calibrated", "magnitude"):
        model = made()
        original = copy.deepcopy(model)
        layers, _ = reduce_model(model, ROWS, Shares(neurons=0.5), method=method)
        outputs = []
        for one in (original, model):
            output = Calibration(one, ROWS).layers[0][1].output
            rows = []
            for row in ROWS:
                with torch.no_grad(), recorded([output]) as passed:
                    one(torch.from_numpy(row.ids.astype(np.int64))[None])
                rows.append(passed[output].returned[0])
            outputs.append(torch.cat(rows))
        before, after = outputs
        if made is tiny_gpt2:  # a bias takes up the mean, so that errors are relative to the variance
            before, after = (one - before.mean(0) for one in (before, after))
        if made is llama or method == "calibrated":  # without a fit, GPT-2's mean stays wrong
            measured = float((after - before).square().sum() / before.square().sum())
            assert layers[0].feed_forward_error == pytest.approx(measured, rel=1e-3)
        found[method] = layers[0].feed_forward_error
    assert 0 < found["calibrated"] < found["magnitude"]


def test_heads_without_effect_go_first_and_cost_nothing():
    model = tiny_gpt2()
    ids = torch.from_numpy(ROWS[0].ids.astype(np.int64))[None]
    attention_of(layers_of(model)[1], model.config).remove([0])
    with torch.no_grad():
        before = model(ids).logits
    layers, _ = reduce_model(model, ROWS, Shares(heads=0.75))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-3, atol=1e-3)
    assert [layer.heads for layer in layers] == [(0, 1), (1,)]
    assert layers[1].head_scores[0] == pytest.approx(0, abs=1e-6 * layers[1].head_scores[1])


losses = st.lists(st.floats(0, 1), min_size=4, max_size=12).map(sorted)


@given(layers=st.lists(losses, min_size=1, max_size=3), block=st.sampled_from([1, 2, 3]), data=st.data())
def test_layers_lose_the_blocks_with_the_least_losses(layers, block, data):
    removals = [Removal(tuple(range(len(one))), torch.tensor([0, *np.cumsum(one)])) for one in layers]
    most = [len(one) // block - 1 for one in layers]
    fewer = data.draw(st.integers(0, sum(most)))
    kept = kept_counts(removals, fewer, block)
    gone = [len(one) - left for one, left in zip(layers, kept, strict=True)]
    assert sum(gone) == fewer * block
    assert all(one % block == 0 and one <= block * limit for one, limit in zip(gone, most, strict=True))
    choices = [one for one in product(*(range(limit + 1) for limit in most)) if sum(one) == fewer]
    least = min(sum(sum(one[: block * n]) for one, n in zip(layers, some, strict=True)) for some in choices)
    assert sum(sum(one[:n]) for one, n in zip(layers, gone, strict=True)) == pytest.approx(least)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with a model and data."""
    place = tmp_path_factory.mktemp("place")
    save_with_chat(tiny_gpt2(tokenizer=characters()), characters(), place / "model")
    lines = [line for one in EXAMPLES for line in (one.prompt, one.answer)]
    (place / "sums.txt").write_text("\n".join(lines) + "\n")
    return place


def reduced(place, *options):
    data = ["--data", f"mathematics:{place / 'sums.txt'}"]
    return CliRunner().invoke(language, ["reduce", str(place / "model"), *data, *options], catch_exceptions=False)


def test_the_command_writes_a_directory_that_exports_to_smaller_caches(place, monkeypatch):
    out = place / "small"
    result = reduced(place, "--out", str(out), "--heads", "0.75", "--neurons", "0.5", "--json")
    assert result.exit_code == 0, result.output
    assert is_language_model(out)
    check_tokenizer_is_kept(place / "model", out)
    record = json.loads((out / "training.json").read_text())["arguments"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["parameters"] < load_backbone(out).num_parameters()
    assert {(one["split"], one["metric"]) for one in metrics["measures"]} >= {
        (split, "cross_entropy") for split in ("before", "holdout")
    }
    with pytest.raises(UsageError, match="got an existing language model"):
        reduced(place, "--out", str(out), "--heads", "0.75")
    prompts = [one.text_before for one in EXAMPLES[:6]]
    monkeypatch.setattr("export.generate.bundle._MOST_ONNX_BYTES", 4 * metrics["parameters"])
    with pytest.raises(UsageError, match=r"model: got [\d,]+ bytes of weights in FP32, expected at most .* Reduce it"):
        export_language_model(place / "model", place / "repository", "whole", prompts=prompts)
    export_language_model(out, place / "repository", "small", prompts=prompts, int8=True)
    manifest = Bundle.open(place / "repository" / "small-1").manifest
    for artifact in (one for tier in manifest.tiers for one in tier.artifacts):
        shapes = {spec.name: spec.shape for spec in manifest.tensors(artifact).inputs}
        assert [shapes[f"past.{n}.key"][1] for n in range(2)] == [len(layer["heads"]) for layer in record["layers"]]
    assert manifest.description == f"GPT2LMHeadModel of {metrics['parameters']:,} parameters"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "0.25"], r"--heads: got 0.25, expected 0.5 to 1, because each layer keeps at least 1 of 2"),
        (["--neurons", "0.01"], "--neurons: got 0.01, expected 0.125 to 1, because each layer keeps at least 8 of 64"),
        ([], "--heads and --neurons: got 1 and 1, expected shares that remove something"),
    ],
)
def test_shares_that_cannot_be_are_refused(place, options, message):
    with pytest.raises(UsageError, match=message):
        reduced(place, "--out", str(place / "none"), *options)
    assert not (place / "none").exists()


def test_too_few_texts_and_other_models_are_refused(place):
    with pytest.raises(ReductionError, match=r"got \d+ tokens in 1 texts, expected more than 64"):
        reduced(place, "--out", str(place / "none"), "--heads", "0.5", "--texts", "1")
    with pytest.raises(UsageError, match=r"--heads: got 0\.5, expected 1 to 1"):
        reduce_model(llama(num_key_value_heads=1), ROWS, Shares(heads=0.5))
    other = place / "other"
    transformers.BertConfig().save_pretrained(other)
    with pytest.raises(CheckpointError, match="model_type: got 'bert', expected one of gpt2"):
        load_backbone(other)
    assert CliRunner().invoke(language, ["reduce", str(other), "--heads", "1.5"]).exit_code == 2
