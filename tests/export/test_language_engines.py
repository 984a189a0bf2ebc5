"""The graphs of language models in TensorRT-RTX: they compile for all rows, tokens and places, in FP32 and in FP16."""

from functools import partial

import pytest
import torch

from edge.bundles.manifest import Profile
from edge.runtimes.tensorrt.build import compile_onnx
from edge.runtimes.tensorrt.profiles import described
from export.generate.decoder import TOKENS, DecoderGraph, cache_names, decoder_onnx
from export.generate.decoder_artifacts import profiles_of
from export.generate.joined_cache import join_caches
from export.models.convert import to_onnx
from export.papers.backward.bundle import FoldedHead
from export.quantize.precision import half
from tests.support.language_models import bpe, tiny_gpt2, tiny_llama
from tests.support.marks import with_rtx

pytestmark = with_rtx

compiled = partial(compile_onnx, flavor="tensorrt_rtx", compute_capability="SM86", subject="a language model")
PRECISIONS = pytest.mark.parametrize("converted", [bytes, half], ids=["fp32", "fp16"])
POSITIONS, ROWS = 64, 8


def as_in_a_bundle(model):
    return half(join_caches(model, 2), fp16_tensors={name for pair in cache_names(2) for name in pair})


@pytest.mark.parametrize(
    ("model", "converted"),
    [
        pytest.param(tiny_gpt2, bytes, marks=pytest.mark.slow),
        pytest.param(tiny_gpt2, half, marks=pytest.mark.slow),
        (tiny_llama, as_in_a_bundle),
    ],
)
def test_a_decoder_compiles(model, converted):
    graph = DecoderGraph(model(positions=POSITIONS))
    profile, step_profile = profiles_of(graph, POSITIONS)
    report = compiled(converted(decoder_onnx(graph)), profile, more_profiles=[step_profile]).report
    assert (report.typing, report.notes) == ("strong", ())
    assert report.profiles == (described(profile), described(step_profile))
    shapes = [profiles[TOKENS] for profiles in (profile, step_profile)]
    assert shapes == [Profile(min=(1, 2), opt=(1, 63), max=(ROWS, 63)), Profile(min=(1, 1), opt=(1, 1), max=(ROWS, 1))]
    # The runner checks tokens. Lengths index the table of positions only together with the places of new tokens.
    assert report.index_limits == {TOKENS: bpe().size}
    if converted is as_in_a_bundle:
        assert report.attention == "2 blocks, fused"


@PRECISIONS
def test_a_head_compiles(converted):
    vocabulary = 96
    axes = {
        "logits": {"batch": (1, 1, ROWS), "vocabulary": (1, vocabulary, vocabulary)},
        "keys": {"groups": (1, 1, 4), "width": (1, 8, 32), "vocabulary": (1, vocabulary, vocabulary)},
        "values": {"groups": (1, 1, 4), "vocabulary": (1, vocabulary, vocabulary), "width": (1, 8, 32)},
        "temperatures": {"groups": (1, 1, 4)},
        "alpha": {"batch": (1, 1, ROWS), "one": (1, 1, 1)},
    }
    profile = {name: Profile(*zip(*sizes.values(), strict=True)) for name, sizes in axes.items()}
    dynamic = {name: {axis: of for axis, of in enumerate(sizes) if of != "one"} for name, sizes in axes.items()}
    shapes = {"batch": 3, "vocabulary": vocabulary, "groups": 2, "width": 5, "one": 1}
    inputs = {name: torch.rand([shapes[size] for size in sizes]) for name, sizes in axes.items()}
    report = compiled(converted(to_onnx(FoldedHead(), inputs, ["moved"], dynamic)), profile).report
    assert (report.typing, report.notes) == ("strong", ())
    assert report.profiles == (described(profile),)
