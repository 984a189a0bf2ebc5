"""FP16 graphs of language models in NumPy, which rounds every result to FP16; ONNX Runtime on a CPU does not."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator

from edge.datatypes import Array
from export.language.decoder import DecoderGraph, decoder_onnx
from export.precision import half
from tests.support.language_models import bpe, tiny_llama


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


def computed(model: bytes, feeds: dict[str, Array]) -> list[Array]:
    """Return the outputs of a model."""
    outputs: list[Array] = ReferenceEvaluator(onnx.load_from_string(model)).run(None, feeds)
    return outputs
