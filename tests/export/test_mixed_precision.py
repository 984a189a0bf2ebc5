"""FP16 graphs of language models in NumPy, which rounds every result to FP16; ONNX Runtime on a CPU does not."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator

from edge.datatypes import Array
from export.generate.decoder import DecoderGraph, decoder_onnx
from export.generate.joined_cache import join_caches
from export.quantize.precision import half
from tests.support.language_models import bpe, tiny_llama, tiny_of


def test_large_activations_and_late_positions_keep_their_logits_in_fp16() -> None:
    model = tiny_llama(positions=1024)
    with torch.no_grad():  # hidden states of about 400, whose squares FP16 does not have
        model.get_input_embeddings().weight.mul_(400 / 0.2)
    graph = DecoderGraph(model)
    plain = decoder_onnx(graph)
    random = np.random.default_rng(0)
    rows, tokens, places = 2, 5, 1000
    feeds = {
        "tokens": random.integers(0, bpe().size, (rows, tokens)),
        "lengths": np.array([[900], [1]]),
        "last": np.array([[4], [2]]),
    }
    for past, _, heads in graph.caches():
        feeds[past] = random.standard_normal((rows, heads, places, graph.width)).astype(np.float32)
    for got, expected in list(zip(computed(half(plain), feeds), computed(plain, feeds), strict=True))[:2]:
        assert np.abs(got - expected).max() < 0.02 * expected.std()  # logits, and keys of the first layer


def test_capped_scores_stay_exact_when_exponentials_compute_the_tanh() -> None:
    model = tiny_of("gemma2", bpe())
    for layer in model.base_model.layers:
        layer.self_attn.attn_logit_softcapping = 50.0  # as published; the largest scores are beyond it
    graph = DecoderGraph(model)
    plain = decoder_onnx(graph)
    joined = join_caches(plain, graph.heads_per_key)
    random = np.random.default_rng(0)
    feeds: dict[str, Array] = {
        "tokens": random.integers(0, bpe().size, (2, 5)), "lengths": np.array([[7], [1]]), "last": np.array([[4], [2]])
    }  # fmt: skip
    for past, _, heads in graph.caches():
        feeds[past] = random.standard_normal((2, heads, 8, graph.width)).astype(np.float32)
    expected, *_ = computed(plain, feeds)
    for converted, most in ((joined, 1e-5), (half(joined), 0.01)):
        got, *_ = computed(converted, feeds)
        assert np.abs(got - expected).max() < most * expected.std()


def computed(model: bytes, feeds: dict[str, Array]) -> list[Array]:
    """Return the outputs of a model."""
    outputs: list[Array] = ReferenceEvaluator(onnx.load_from_string(model)).run(None, feeds)
    return outputs
