"""The graph of a decoder in the precisions of a bundle's tiers, and what is recorded of each."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Profile
from edge.datatypes import Array, TensorSpec
from edge.runtimes.host import FEWEST_PLACES
from export.bundle.exported import FULL, int8_tier
from export.bundle.tier_files import measured
from export.generate.decoder import LAST, LENGTHS, LOGITS, TOKENS, DecoderGraph, cache_names, decoder_onnx
from export.generate.joined_cache import join_caches
from export.models.convert import OPSET, golden_of
from export.quantize.int8 import dynamic_int8
from export.quantize.precision import fused, half

MAX_BATCH_SIZE = 8
_GOLDEN, _FP16_GOLDEN = "backbone.golden.npz", "backbone.fp16.golden.npz"
#: Tokens of a prompt that TensorRT tunes for.
_USUAL_PROMPT = 128
#: The smallest, the best and the largest number of something.
_Sizes = tuple[int, int, int]


class Decoders(NamedTuple):
    """The graph in all precisions.

    Attributes:
        artifacts: of each tier; the first one runs on ONNX Runtime.
        files: those of the artifacts and their golden sets.
        differences: the largest one to torch of each ONNX file.
    """

    artifacts: dict[str, tuple[Artifact, ...]]
    files: dict[str, bytes]
    differences: dict[str, float]


def decoders_of(graph: DecoderGraph, vocabulary: int, positions: int, *, int8: bool) -> Decoders:
    """Return a graph in FP32 and FP16, and if wanted as a tier in INT8 for ONNX Runtime.

    Args:
        positions: tokens of prompt and text together.

    Raises:
        GoldenError: ONNX Runtime's logits differ from torch's.
    """
    plain = decoder_onnx(graph)
    step_golden = _step_golden(graph, vocabulary)
    cache = {name for pair in cache_names(graph.layers) for name in pair}
    goldens = {_GOLDEN: step_golden, _FP16_GOLDEN: _in_fp16(step_golden, cache)}
    files = {file: one.encode() for file, one in goldens.items()}
    joined = half(join_caches(plain, graph.heads_per_key), fp16_tensors=cache)
    made = {FULL: [("onnxruntime", "fp32", fused(plain)), ("tensorrt", "fp16", joined)]}
    if int8:
        made[int8_tier(FULL)] = [("onnxruntime", "int8", dynamic_int8(plain, has_head=b"LayerNormalization" in plain))]
    profile, step_profile = profiles_of(graph, positions)
    artifacts: dict[str, tuple[Artifact, ...]] = {}
    differences: dict[str, float] = {}
    for tier, steps in made.items():
        for runtime, precision, data in steps:
            file = f"{tier}.{runtime}.{precision}.onnx"
            kind, golden = ("FP16", _FP16_GOLDEN) if precision == "fp16" else ("FP32", _GOLDEN)
            difference, tolerance = measured(data, goldens[golden], precision, file)
            files[file], differences[file] = data, difference
            artifact = Artifact(
                file=file, runtime=runtime, precision=precision, opset=OPSET, role="backbone",
                tolerance=tolerance, golden=golden, profile=profile,
                more_profiles=(step_profile,), **_tensors(graph, vocabulary, kind),
            )  # fmt: skip
            artifacts[tier] = (*artifacts.get(tier, ()), artifact)
    return Decoders(artifacts, files, differences)


def _tensors(graph: DecoderGraph, vocabulary: int, cache: str) -> dict[str, tuple[TensorSpec, ...]]:
    reads = [TensorSpec(TOKENS, "INT64", (-1, -1)), *(TensorSpec(name, "INT64", (-1, 1)) for name in (LENGTHS, LAST))]
    gives = [TensorSpec(LOGITS, "FP32", (-1, vocabulary))]
    for past, new, heads in graph.caches():
        for specs, name in ((reads, past), (gives, new)):
            specs.append(TensorSpec(name, cache, (-1, heads, -1, graph.width)))
    return {"inputs": tuple(reads), "outputs": tuple(gives)}


def profiles_of(graph: DecoderGraph, positions: int) -> tuple[dict[str, Profile], dict[str, Profile]]:
    """Return the profiles of a decoder's graph for prompts, with hardly a cache, and for single tokens behind one."""
    most = max(FEWEST_PLACES, 1 << (positions - 1).bit_length())  # the places of a cache
    usual = min(_USUAL_PROMPT, positions - 1)
    return (
        _profile(graph, tokens=(min(2, positions - 1), usual, positions - 1), places=(1, 1, FEWEST_PLACES)),
        _profile(graph, tokens=(1, 1, 1), places=(1, most // 2, most)),
    )


def _profile(graph: DecoderGraph, *, tokens: _Sizes, places: _Sizes) -> dict[str, Profile]:
    """Return a profile from the smallest, the best and the largest number of tokens and of places."""
    rows = (1, 1, MAX_BATCH_SIZE)
    column = Profile(*((count, 1) for count in rows))
    found = {TOKENS: Profile(*zip(rows, tokens, strict=True)), LENGTHS: column, LAST: column}
    for past, _, heads in graph.caches():
        found[past] = Profile(*((count, heads, size, graph.width) for count, size in zip(rows, places, strict=True)))
    return found


def _step_golden(graph: DecoderGraph, vocabulary: int) -> Golden:
    """Return random tokens behind a cache of a prompt with random tokens, partly filled, and the graph's outputs."""
    random = np.random.default_rng(0)
    rows, places, tokens = 2, 8, 3
    columns: list[tuple[str, Array]] = [
        (TOKENS, random.integers(0, vocabulary, (rows, tokens))),
        (LENGTHS, np.array([[places], [places - 3]])),
        (LAST, np.array([[tokens - 1], [0]])),
    ]
    caches = graph.caches()
    prompt = torch.from_numpy(random.integers(0, vocabulary, (rows, places)))
    nothing = [torch.zeros(rows, heads, 1, graph.width) for _, _, heads in caches]
    with torch.no_grad():
        _, *past = graph(prompt, torch.zeros(rows, 1, dtype=torch.int64), torch.full((rows, 1), places - 1), *nothing)
    inputs = dict(columns) | {name: tensor.numpy() for (name, *_), tensor in zip(caches, past, strict=True)}
    return golden_of(graph, inputs, [LOGITS, *(new for _, new, _ in caches)])


def _in_fp16(golden: Golden, cache: Collection[str]) -> Golden:
    """Return a golden set whose tensors of the cache are rounded to FP16."""
    reads, gives = (
        {name: array.astype(np.float16) if name in cache else array for name, array in arrays.items()}
        for arrays in (golden.inputs, golden.outputs)
    )
    return Golden(reads, gives)
