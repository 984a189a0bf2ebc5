"""Reduced language models: what is removed, what the rest is fitted to, and that an export drops it."""

import copy
import json
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from export.bundle.exportable import export_bundle
from export.cli.language import language
from export.generate.bundle import LanguageModel
from export.generate.decoder import DecoderGraph
from export.generate.files import is_language_model
from export.generate.model import load_backbone
from export.generate.ranking import kept_counts
from export.generate.reduce import reduce_decoder
from export.generate.sublayers import attention_of, layers_of, left_parameters, sublayers_of
from export.models.recorded import recorded
from export.reduce.algebra import Removal
from tests.support.language_models import (
    EXAMPLES,
    bpe,
    characters,
    check_tokenizer_is_kept,
    save_with_chat,
    tiny_gpt2,
    tiny_llama,
    tiny_of,
)
from tests.support.task_data import invoke

pytest.importorskip("transformers")

ROWS = [bpe().encode(one) for one in EXAMPLES]


#: GPT-2, shared heads without biases, and normalised heads with a window that are together wider than the model.
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3_text"])
def test_a_graph_without_the_removed_heads_and_neurons_computes_the_logits_of_the_model_with_zeros(kind):
    model = tiny_gpt2() if kind == "gpt2" else tiny_of(kind, bpe())
    whole = model.num_parameters()
    heads = tuple(shape.num_heads for shape in reduce_decoder(model, ROWS, 0.75, 0.5).plan.shapes)
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
    assert graph.model.num_parameters() == left_parameters(model) < whole


@torch.no_grad()
def first_feed_forward(model):
    """Return the outputs of the first feed-forward for all tokens of the texts, [tokens, d]."""
    output = sublayers_of(model)[0][1].output
    with recorded([output]) as passed:
        rows = []
        for row in ROWS:
            model(torch.from_numpy(row.ids.astype(np.int64))[None])
            rows.append(passed[output].returned[0])
    return torch.cat(rows)


@pytest.mark.parametrize("made", [tiny_gpt2, tiny_llama])
def test_reported_errors_are_those_of_the_outputs_and_less_than_without_a_fit(made):
    model = made()
    original, unfitted = copy.deepcopy(model), copy.deepcopy(model)
    first, *_ = reduce_decoder(model, ROWS, neurons=0.5).reports
    feed_forward = sublayers_of(unfitted)[0][1]
    feed_forward.remove(sorted({*range(feed_forward.groups)} - {*first.plan.neurons}))
    before, after, cut = (first_feed_forward(of) for of in (original, model, unfitted))
    if made is tiny_gpt2:  # a bias takes up the mean, so that errors are relative to the variance
        before, after, cut = (outputs - before.mean(0) for outputs in (before, after, cut))
    measured, without = (float((one - before).square().sum() / before.square().sum()) for one in (after, cut))
    assert first.feed_forward_error == pytest.approx(measured, rel=1e-3)
    assert 0 < measured < without


def test_heads_without_effect_go_first_and_cost_nothing():
    model = tiny_gpt2()
    ids = torch.from_numpy(ROWS[0].ids.astype(np.int64))[None]
    attention_of(layers_of(model)[1], model.config).remove([0])
    with torch.no_grad():
        before = model(ids).logits
    reduced = reduce_decoder(model, ROWS, heads=0.75)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-3, atol=1e-3)
    assert [layer.heads for layer in reduced.plan.layers] == [(0, 1), (1,)]
    scores = reduced.reports[1].head_scores
    assert scores[0] == pytest.approx(0, abs=1e-6 * scores[1])


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
    return invoke(language, "reduce", place / "model", "--data", f"mathematics:{place / 'sums.txt'}", *options)


def test_the_command_writes_a_directory_that_exports_to_smaller_caches(place, monkeypatch):
    out = place / "small"
    reduced(place, "--out", out, "--heads", 0.75, "--neurons", 0.5, "--json")
    assert is_language_model(out)
    check_tokenizer_is_kept(place / "model", out)
    record = json.loads((out / "training.json").read_text())["arguments"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["parameters"] < load_backbone(out).num_parameters()
    measured = {(of["split"], of["metric"]) for of in metrics["measures"]}
    assert measured >= {("before", "cross_entropy"), ("holdout", "cross_entropy")}
    with pytest.raises(UsageError, match="got an existing model of fewheads language"):
        reduced(place, "--out", out, "--heads", 0.75)
    prompts = [one.text_before for one in EXAMPLES[:6]]
    monkeypatch.setattr("export.generate.bundle._MOST_ONNX_BYTES", 4 * metrics["parameters"])
    with pytest.raises(UsageError, match=r"model: got [\d,]+ bytes of weights in FP32, expected at most .* Reduce it"):
        export_bundle(LanguageModel(place / "model", "whole", prompts), place / "repository")
    export_bundle(LanguageModel(out, "small", prompts, int8=True), place / "repository")
    manifest = Bundle.open(place / "repository" / "small-1").manifest
    for artifact in (one for tier in manifest.tiers for one in tier.artifacts):
        shapes = {spec.name: spec.shape for spec in manifest.tensors(artifact).inputs}
        assert [shapes[f"past.{n}.key"][1] for n in range(2)] == [len(layer["heads"]) for layer in record["layers"]]
    assert manifest.description == f"GPT2LMHeadModel of {metrics['parameters']:,} parameters"
