"""Export of a causal language model of Hugging Face's transformers to a bundle that generates text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from edge.bundles.golden import Golden, check_outputs
from edge.bundles.manifest import Artifact, Manifest, Profile, Tier, Tolerance
from edge.bundles.preprocess import load_tokenizer
from edge.bundles.programs import CacheTensor, GenerateProgram
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import Array, TensorSpec
from edge.errors import Raw, UsageError
from edge.programs.generate import Generate
from edge.programs.tier_program import golden_options
from edge.runtimes.host import FEWEST_PLACES
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exportable import Contents, ExportedArtifact, File, OnRows
from export.bundle.exported import FULL, int8_tier
from export.bundle.tier_files import checked_file
from export.generate.decoder import LAST, LENGTHS, LOGITS, TOKENS, DecoderGraph, cache_names, decoder_onnx
from export.generate.decoding import end_tokens
from export.generate.golden import clearest, golden_of_texts, greedy_of_file, greedy_of_model
from export.generate.joined_cache import join_caches
from export.generate.model import BaseIdentity, identity_of, load_backbone
from export.generate.sublayers import left_parameters
from export.models.convert import golden_of
from export.quantize.int8 import dynamic_int8
from export.quantize.precision import fused, half
from export.training.provenance import provenance
from export.training.runs import TOKENIZER

MAX_BATCH_SIZE = 8
#: Tokens of prompt and text together, unless the model has fewer positions: the cache grows with them.
MOST_POSITIONS = 1024
_GOLDEN = "golden.npz"
_STEP_GOLDEN, _FP16_STEP_GOLDEN = "backbone.golden.npz", "backbone.fp16.golden.npz"
_PROMPT, _IDS, _MASK, _TEXT, _GENERATED = "prompt", "ids", "mask", "text", "generated"
#: Longer texts are refused before they are tokenized; no usual token has more bytes on average.
_BYTES_PER_TOKEN = 16
_DEFAULT_TOKENS = 64
#: Protocol Buffers, and so an ONNX file, end at 2 GiB; the graph needs some of it.
_MOST_ONNX_BYTES = 2**31 - 2**24
#: Golden prompts at most.
_GOLDEN_ROWS = 4
#: Tokens of a prompt that TensorRT tunes for.
_USUAL_PROMPT = 128
#: The smallest, the best and the largest number of something.
_Sizes = tuple[int, int, int]


class Decoders(NamedTuple):
    """The graph of a decoder in all precisions."""

    artifacts: dict[str, tuple[Artifact, ...]]  # of each tier; the first one runs on ONNX Runtime
    models: dict[str, ExportedArtifact]  # by their files
    goldens: dict[str, Golden]


class LanguageModel(NamedTuple):
    """A model directory of transformers: an :class:`export.bundle.exportable.Exportable`.

    Attributes:
        directory: config.json, weights as safetensors, and tokenizer.json.
        name: of the bundle.
        prompts: of the kind that the model is for; the clearest ones become golden.
        int8: whether there is a tier in INT8 too, for ONNX Runtime on the CPU.
        positions: tokens of prompt and text together; None is as many as the model has, 1,024 at most.
    """

    directory: Path
    name: str
    prompts: Sequence[str]
    int8: bool = False
    positions: int | None = None

    def contents(self, on_rows: OnRows | None) -> Contents:
        """See :class:`export.bundle.exportable.Exportable`; no accuracy is measured.

        Raises:
            UsageError: the directory is no causal language model, ``positions`` are more than it has, or no prompt has
                a clear text.
        """
        model = load_backbone(self.directory)
        size_bytes = 4 * left_parameters(model)
        if size_bytes > _MOST_ONNX_BYTES:
            fix = "Reduce it, or take a smaller one: a bundle's ONNX file contains the weights."
            given = Raw(f"{size_bytes:,} bytes of weights in FP32")
            raise UsageError(f"{self.directory}", given=given, expected=f"at most {_MOST_ONNX_BYTES:,}", fix=fix)
        definition = _tokenizer_of(self.directory)
        config = model.config.get_text_config()
        most = int(config.max_position_embeddings)
        positions = min(most, MOST_POSITIONS) if self.positions is None else self.positions
        if not 2 <= positions <= most:
            fix = "Leave --positions out."
            raise UsageError("--positions", given=positions, expected=f"2 to {most}, the model's", fix=fix)
        tokenize = TokenizerPreprocess(
            input=_PROMPT,
            file=TOKENIZER,
            ids=_IDS,
            mask=_MASK,
            max_length=positions - 1,
            pad_id=0,
            max_text_bytes=_BYTES_PER_TOKEN * positions,
        )
        program = GenerateProgram(
            tokens=TOKENS,
            lengths=LENGTHS,
            last=LAST,
            logits=LOGITS,
            text=_TEXT,
            generated=_GENERATED,
            cache=tuple(CacheTensor(past=past, new=new) for past, new in cache_names(config.num_hidden_layers)),
            positions=positions,
            max_tokens=min(_DEFAULT_TOKENS, positions // 2),
            end_tokens=end_tokens(model),
        )
        tokenizer = load_tokenizer(definition, str(self.directory / TOKENIZER))
        texts = greedy_of_model(model, tokenizer, self.prompts, program)
        references = clearest(texts, _GOLDEN_ROWS, FULL)
        calibration = [[*text.ids, *text.tokens] for text in texts] if self.int8 else []
        decoders = decoders_of(DecoderGraph(model), config.vocab_size, positions, calibration)
        files: dict[str, File] = {TOKENIZER: definition, **decoders.goldens, **decoders.models}
        tiers = []
        for tier, artifacts in decoders.artifacts.items():
            onnx = decoders.models[artifacts[0].file].data
            with (
                closing(OnnxRuntimeRunner(onnx, subject="a decoder")) as runner,
                closing(Generate(program, {FULL: runner}, tokenizer, _IDS, _MASK)) as generate,
            ):
                # INT8 may lead to other texts. Rows that run together share its scales, so one row stands alone.
                clear = references if tier == FULL else clearest(greedy_of_file(generate, FULL, references), 1, tier)
                golden = golden_of_texts(clear, tokenizer, program, tokenize, definition)
                outputs = generate.compute(golden.inputs, golden_options(program, FULL, golden)).outputs
            check_outputs(outputs, golden, Tolerance(atol=0, rtol=0), f"{tier} on ONNX Runtime")
            file = None if tier == FULL else f"{tier}.{_GOLDEN}"
            files[file or _GOLDEN] = golden
            tiers.append(Tier(name=tier, artifacts=artifacts, golden=file))
        shape = Profile(min=(1, 1), opt=(1, min(32, positions - 1)), max=(MAX_BATCH_SIZE, positions - 1))
        manifest = Manifest(
            name=self.name,
            version=1,
            description=f"{type(model).__name__} of {sum(of.numel() for of in model.parameters()):,} parameters",
            inputs=tuple(TensorSpec(tensor, "INT64", (-1, -1)) for tensor in (_IDS, _MASK)),
            outputs=(TensorSpec(_TEXT, "BYTES", (-1, 1)), TensorSpec(_GENERATED, "INT32", (-1, 1))),
            max_batch_size=MAX_BATCH_SIZE,
            profile={_IDS: shape, _MASK: shape},
            tiers=tuple(tiers),
            golden=_GOLDEN,
            files={},
            provenance=provenance(trainer=origin_of(identity_of(self.directory)), data="see the model", seed=None),
            preprocess=tokenize,
            program=program,
        )
        return Contents(manifest, files)


def origin_of(identity: BaseIdentity) -> str:
    """Return how the record of a bundle names the language model that it was made from."""
    return f"{identity.name}, SHA-256 {identity.sha256}"


def is_origin(origin: str, identity: BaseIdentity) -> bool:
    """Return whether a record names a language model so, whose directory may have another name now."""
    return origin.rpartition(", SHA-256 ")[2] == identity.sha256


def decoders_of(
    graph: DecoderGraph, vocabulary: int, positions: int, calibration: Sequence[Sequence[int]] = ()
) -> Decoders:
    """Return a graph for ``positions`` tokens in FP32, FP16 and, with a calibration, dynamic INT8.

    Args:
        calibration: tokens of prompts with their texts, to find the products that INT8 leaves in FP32.

    Raises:
        GoldenError: a file computes other logits than torch.
    """
    plain = decoder_onnx(graph)
    step_golden = _step_golden(graph, vocabulary)
    cache = {name for past, new, _ in graph.caches() for name in (past, new)}
    goldens = {_STEP_GOLDEN: step_golden, _FP16_STEP_GOLDEN: _in_fp16(step_golden, cache)}
    joined = half(join_caches(plain, graph.heads_per_key), fp16_tensors=cache)
    made = {FULL: [("onnxruntime", "fp32", fused(plain)), ("tensorrt", "fp16", joined)]}
    if calibration:
        feeds = [_alone(graph, tokens) for tokens in calibration]
        data = dynamic_int8(plain, feeds, has_head=b"LayerNormalization" in plain)
        made[int8_tier(FULL)] = [("onnxruntime", "int8", data)]
    profile, step_profile = profiles_of(graph, positions)
    artifacts, models = dict[str, tuple[Artifact, ...]](), dict[str, ExportedArtifact]()
    for tier, steps in made.items():
        for runtime, precision, data in steps:
            file = f"{tier}.{runtime}.{precision}.onnx"
            kind, golden = ("FP16", _FP16_STEP_GOLDEN) if precision == "fp16" else ("FP32", _STEP_GOLDEN)
            models[file] = checked_file(
                data,
                goldens[golden],
                file,
                runtime,
                precision,
                role="backbone",
                golden=golden,
                profile=profile,
                more_profiles=(step_profile,),
                **_tensors(graph, vocabulary, kind),
            )
            artifacts[tier] = (*artifacts.get(tier, ()), models[file].artifact)
    return Decoders(artifacts, models, goldens)


def profiles_of(graph: DecoderGraph, positions: int) -> tuple[dict[str, Profile], dict[str, Profile]]:
    """Return the profiles of a decoder's graph for prompts, with hardly a cache, and for single tokens behind one."""
    most = max(FEWEST_PLACES, 1 << (positions - 1).bit_length())  # the places of a cache
    usual = min(_USUAL_PROMPT, positions - 1)
    return (
        _profile(graph, tokens=(min(2, positions - 1), usual, positions - 1), places=(1, 1, FEWEST_PLACES)),
        _profile(graph, tokens=(1, 1, 1), places=(1, most // 2, most)),
    )


def _profile(graph: DecoderGraph, *, tokens: _Sizes, places: _Sizes) -> dict[str, Profile]:
    rows = (1, 1, MAX_BATCH_SIZE)
    column = Profile(*((count, 1) for count in rows))
    profile = {TOKENS: Profile(*zip(rows, tokens, strict=True)), LENGTHS: column, LAST: column}
    for past, _, heads in graph.caches():
        profile[past] = Profile(*((count, heads, size, graph.width) for count, size in zip(rows, places, strict=True)))
    return profile


def _tensors(graph: DecoderGraph, vocabulary: int, cache: str) -> dict[str, Any]:
    reads = [TensorSpec(TOKENS, "INT64", (-1, -1)), *(TensorSpec(name, "INT64", (-1, 1)) for name in (LENGTHS, LAST))]
    gives = [TensorSpec(LOGITS, "FP32", (-1, vocabulary))]
    for past, new, heads in graph.caches():
        for specs, name in ((reads, past), (gives, new)):
            specs.append(TensorSpec(name, cache, (-1, heads, -1, graph.width)))
    return {"inputs": tuple(reads), "outputs": tuple(gives)}


def _alone(graph: DecoderGraph, tokens: Sequence[int]) -> dict[str, Array]:
    """Return the inputs for one row of tokens behind an empty cache."""
    last = len(tokens) - 1
    past = {name: np.zeros((1, heads, 1, graph.width), np.float32) for name, _, heads in graph.caches()}
    return {TOKENS: np.array([tokens]), LENGTHS: np.array([[0]]), LAST: np.array([[last]]), **past}


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


def _tokenizer_of(directory: Path) -> bytes:
    try:
        return (directory / TOKENIZER).read_bytes()
    except OSError as error:
        fix = "Save it with the tokenizer's save_pretrained."
        raise UsageError(f"{directory / TOKENIZER}", given=Raw(error), expected="a file", fix=fix) from None
