"""INT8 and FP16: ranges, the arithmetic of files, and what golden checks notice."""

import copy
import json
import shutil

import numpy as np
import onnx
import pytest
import safetensors.torch
import scipy.stats
import torch
from msgspec.structs import replace
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from edge.bundles.bundle import Bundle
from edge.bundles.golden import check_outputs
from edge.errors import GoldenError, UsageError
from export.bundle.tier_files import export_tier
from export.cli.export import export
from export.cli.import_ import import_
from export.cli.int8 import int8
from export.data.examples import Examples
from export.data.tokens import encode, load_tokenizer
from export.finetune.imported import answers
from export.finetune.models import open_model
from export.finetune.predictions import read_predictions
from export.generate.decoder import DecoderGraph, decoder_onnx
from export.generate.joined_cache import join_caches
from export.models.convert import golden_of, outputs_of
from export.quantize.calibration import calibration_feeds, feeds_of, plain_onnx
from export.quantize.int8 import dynamic_int8, quantized
from export.quantize.precision import half
from export.quantize.ranges import LARGEST, Scheme, input_ranges, projections
from tests.support.imported_directories import with_tokenizer, write_embedder
from tests.support.language_models import bpe, tiny_of
from tests.support.task_data import encoded, invoke, make_classifier, make_sentiment, write_rows


@pytest.fixture(scope="module")
def model():
    """A model, its graph in FP32, texts, and all of them as one batch with padding.

    It is not trained: the logits of the toy task hardly depend on the weights any more.
    """
    head, rows = make_classifier(3).eval(), encoded(make_sentiment(64))
    return head, plain_onnx(head, rows), rows, feeds_of(rows, np.arange(64))


def constants(data):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load_from_string(data).graph.initializer}


def products(plain):
    """Return the node of each product, by its name."""
    return {node.name: node for node in projections(onnx.load_from_string(plain), has_head=True)}


def read_by(head, batches):
    """Return the input of each product in torch, [tokens, features], by the product's name."""
    found = {}
    for name, layer in head.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith("transformer."):
            keep = found.setdefault(name, []).append
            layer.register_forward_hook(lambda _, inputs, __, keep=keep: keep(inputs[0][0]))
    with torch.no_grad():
        for batch in batches:
            head(*(torch.from_numpy(array) for array in batch.values()))
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


def test_ranges_are_those_of_the_tokens_without_padding(model):
    head, plain, rows, padded = model
    feeds = calibration_feeds(rows)
    inputs = read_by(copy.deepcopy(head), feeds)
    ranges = input_ranges(plain, feeds, LARGEST)
    assert set(ranges) == set(inputs)
    for name, values in inputs.items():
        assert ranges[name].largest == pytest.approx(np.abs(values).max(), rel=1e-5), name
    far = {name: np.pad(array, ((0, 0), (0, 50))) for name, array in padded.items()}
    with_padding = input_ranges(plain, [far], LARGEST)
    assert any(with_padding[name].largest > 1.001 * ranges[name].largest for name in ranges)


def test_smoothing_moves_sizes_into_the_weights_without_rounding(model):
    _, plain, rows, _ = model
    ranges = input_ranges(plain, calibration_feeds(rows), replace(LARGEST, smoothing=0.5))
    before, after = constants(plain), constants(quantized(plain, ranges))
    for name, node in products(plain).items():
        factors = ranges[name].factors
        assert (factors is None) == name.endswith(".down")
        if factors is None:
            continue
        assert np.array_equal(np.log2(factors), np.round(np.log2(factors)))
        assert len(set(factors.tolist())) > 1
        assert np.array_equal(after[f"{node.input[0]}.factors"] * factors, np.ones_like(factors))
        difference = (
            after[f"{name}.weight.int8"] * after[f"{name}.weight.scale"] - before[node.input[1]] * factors[:, None]
        )
        assert (np.abs(difference) <= 0.51 * after[f"{name}.weight.scale"]).all()


def test_a_product_whose_input_one_unit_dominates_stays_in_fp32_on_onnx_runtime(model):
    head, _, rows, inputs = model
    head, feeds = copy.deepcopy(head), calibration_feeds(rows, 16)
    with torch.no_grad():  # no output shows the unit, but it takes the levels of all others
        head.transformer.layers[1].feed_forward.up.bias[0] = 1000.0
        head.transformer.layers[1].feed_forward.down.weight[:, 0] = 0.0
    plain = plain_onnx(head, rows)
    want = outputs_of(plain, inputs, "plain")["logits"]
    measured, blind = dynamic_int8(plain, feeds), dynamic_int8(plain)
    kept = {node.name for node in onnx.load_from_string(measured).graph.node} & products(plain).keys()
    assert kept == {"transformer.layers.1.feed_forward.down"}
    errors = [np.abs(outputs_of(file, inputs, "file")["logits"] - want).max() for file in (measured, blind)]
    assert errors[0] < errors[1] / 3


def test_a_run_that_an_earlier_version_trained_for_int8_is_read_as_one_in_fp32(place, tmp_path):
    shutil.copytree(place / "SST-2", tmp_path / "rounded")
    config, weights = tmp_path / "rounded" / "config.json", tmp_path / "rounded" / "weights.safetensors"
    written, tensors = json.loads(config.read_text()), safetensors.torch.load_file(weights)
    written["arguments"]["int8"] = ["transformer.layers.0.feed_forward.up"]
    config.write_text(json.dumps(written))
    safetensors.torch.save_file(tensors | {"transformer.layers.0.feed_forward.up.largest": torch.tensor(2.0)}, weights)
    found, plain = (open_model(run) for run in (tmp_path / "rounded", place / "SST-2"))
    assert found.architecture == plain.architecture
    assert found.head.state_dict().keys() == tensors.keys()
    # What it recorded is of INT8: no file in FP32 gets it, and nothing is compared with it.
    options = ("--name", "rounded", "--artifacts", "onnxruntime", "--data-dir", place)
    invoke(export, tmp_path / "rounded", "--repository", tmp_path, *options)
    measures = [(one.metric, one.split) for one in Bundle.open(tmp_path / "rounded-1").manifest.measures]
    assert measures == [("accuracy", f"{split}, tier x1-int8 on onnxruntime") for split in ("holdout", "dev")]
    with pytest.raises(
        UsageError, match=r"rounded: got a run that an earlier version trained for INT8, expected a run"
    ):
        invoke(int8, tmp_path / "rounded", "--data-dir", place)
    tiers = ("--name", "cascade", "--tier-name", "a", "--tier-name", "b", "--cascade", 0.3, "--data-dir", place)
    with pytest.raises(UsageError, match=r"--cascade: got 0\.3, expected two classifiers .*, measured in FP32\. Give"):
        invoke(export, place / "SST-2", tmp_path / "rounded", "--repository", tmp_path, *tiers)


def corrupt(data, name, change):
    """Return a file with one of its constants changed."""
    model = onnx.load_from_string(data)
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))
    return model.SerializeToString()


def doubled(array):
    return array * array.dtype.type(2)


def without_a_channel(array):
    array[:, int(np.abs(array).sum(axis=0, dtype=np.int64).argmax())] = 0
    return array


def test_the_golden_check_notices_broken_constants_and_accepts_other_rounding(model):
    head, plain, rows, inputs = model
    feeds = calibration_feeds(rows)
    ranges = input_ranges(plain, feeds, Scheme())
    torchs = golden_of(head, inputs, ["logits"])
    (made,) = export_tier(head, torchs, feeds, runtimes=["tensorrt"], precisions=["int8"])
    tolerance, golden = made.artifact.tolerance, made.golden
    assert made.artifact.golden == "full.tensorrt.int8.golden.npz"
    spread = golden.outputs["logits"].std()
    assert tolerance.atol < 0.05 * spread
    assert tolerance.rms < 0.01 * spread
    check_outputs(outputs_of(quantized(plain, ranges), inputs, "FP32"), golden, tolerance, "other rounding")
    values = constants(made.data)
    weight = next(name for name in values if name.endswith("layers.1.feed_forward.up.weight.int8"))
    first, *_, last = [name for name in values if name.endswith(".scale") and values[name].shape == ()]
    for broken in (
        corrupt(made.data, weight.replace(".int8", ".scale"), doubled),
        corrupt(made.data, weight, without_a_channel),
        corrupt(corrupt(made.data, first, lambda _: values[last]), last, lambda _: values[first]),
    ):
        with pytest.raises(GoldenError, match="broken output 'logits' on 64 golden rows: got a"):
            check_outputs(outputs_of(broken, inputs, "broken"), golden, tolerance, "broken")


def test_ways_are_compared_on_a_split(place):
    run = place / "SST-2"
    options = ("--data-dir", place, "--calibration", 32, "--split", "dev")
    found = json.loads(invoke(int8, run, *options, "--method", "dynamic", "--method", "largest", "--json"))
    assert (found["task"], found["metric"], found["split"], found["n"]) == ("SST-2", "accuracy", "dev", 40)
    kept = read_predictions(run, "dev")
    assert found["fp32"] == kept.score("accuracy")
    assert [one["method"] for one in found["scored"]] == ["dynamic", "largest"]
    for one in found["scored"]:
        assert one["difference"]["value"] == pytest.approx(one["value"] - found["fp32"])
        assert 0 < one["logits_error"] < 0.2
    with pytest.raises(UsageError, match=r"--method: got 'magic', expected one of dynamic; largest; smoothed"):
        invoke(int8, run, "--data-dir", place, "--method", "magic")
    with pytest.raises(UsageError, match=r"--split: got 'test', expected one of holdout, dev"):
        invoke(int8, run, "--data-dir", place, "--method", "dynamic", "--split", "test")


def test_a_model_that_embeds_sentences_is_scored_by_its_cosines(tmp_path):
    texts = [text for text, _ in make_sentiment(120)]
    scores = np.linspace(0, 5, 60).round(1)
    for split in ("train", "dev"):
        rows = zip(texts[::2], texts[1::2], scores, strict=True)
        write_rows(tmp_path / "glue" / "STS-B" / f"{split}.tsv", ("sentence1", "sentence2", "score"), [*rows])
    with_tokenizer(write_embedder(tmp_path / "directory"))
    invoke(import_, tmp_path / "directory", "--out", tmp_path / "run")
    methods = ("dynamic", "smoothed, largest, down and output_proj in FP16")
    options = ("--data-dir", tmp_path, "--split", "dev", *(part for one in methods for part in ("--method", one)))
    found = json.loads(invoke(int8, tmp_path / "run", *options, "--json"))
    assert (found["task"], found["metric"], found["split"], found["n"]) == ("STS-B", "spearman", "dev", 60)
    rows = encode(load_tokenizer(tmp_path / "run"), Examples(tuple((text,) for text in texts), np.zeros(120)), 64)
    embeddings = torch.from_numpy(answers(open_model(tmp_path / "run").head, rows))
    cosines = torch.cosine_similarity(embeddings[::2], embeddings[1::2]).numpy()
    assert found["fp32"] == pytest.approx(scipy.stats.spearmanr(cosines, scores).statistic, abs=1e-3)
    dynamic, exported = found["scored"]
    assert (dynamic["int8_share"], exported["int8_share"]) == (1, pytest.approx(5 / 8))  # up, and three of four
    assert all(0 < one["logits_error"] < 0.2 for one in found["scored"])


def test_large_activations_and_late_positions_keep_their_logits_in_fp16():
    model = tiny_of("llama", bpe(), positions=1024, layers=1)
    with torch.no_grad():  # hidden states of about 400, whose squares FP16 does not have
        model.get_input_embeddings().weight.mul_(400 / 0.2)
    graph = DecoderGraph(model)
    plain = decoder_onnx(graph)
    feeds = feeds_for(graph, lengths=[[900], [1]], places=1000)
    for got, expected in list(zip(computed(half(plain), feeds), computed(plain, feeds), strict=True))[:2]:
        assert np.abs(got - expected).max() < 0.02 * expected.std()  # logits, and keys of the first layer


def test_capped_scores_stay_exact_when_exponentials_compute_the_tanh():
    model = tiny_of("gemma2", bpe(), layers=1)
    for layer in model.base_model.layers:
        layer.self_attn.attn_logit_softcapping = 50.0  # as published; the largest scores are beyond it
    graph = DecoderGraph(model)
    plain = decoder_onnx(graph)
    joined = join_caches(plain, graph.heads_per_key)
    feeds = feeds_for(graph, lengths=[[7], [1]], places=8)
    expected, *_ = computed(plain, feeds)
    for converted, most in ((joined, 1e-5), (half(joined), 0.01)):
        got, *_ = computed(converted, feeds)
        assert np.abs(got - expected).max() < most * expected.std()


def feeds_for(graph, lengths, places):
    """Return five tokens for each of two rows, with a cache."""
    random = np.random.default_rng(0)
    feeds = {
        "tokens": random.integers(0, bpe().size, (2, 5)),
        "lengths": np.array(lengths),
        "last": np.array([[4], [2]]),
    }
    for past, _, heads in graph.caches():
        feeds[past] = random.standard_normal((2, heads, places, graph.width)).astype(np.float32)
    return feeds


def computed(model, feeds):
    return ReferenceEvaluator(onnx.load_from_string(model)).run(None, feeds)
