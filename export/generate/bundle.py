"""Export of a causal language model of Hugging Face's transformers to a bundle that generates text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace as replaced

from edge.bundles.fields import MOST_BLOCKS
from edge.bundles.golden import Golden, check_outputs
from edge.bundles.manifest import Artifact, Manifest, Profile, Tier, Tolerance
from edge.bundles.preprocess import load_tokenizer
from edge.bundles.programs import CacheTensor, GenerateProgram, backbone_roles
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
    """The blocks of a decoder in all precisions."""

    artifacts: dict[str, tuple[Artifact, ...]]  # of each tier
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
        layers_per_block: of each ONNX file, at most; None has all layers in one.
    """

    directory: Path
    name: str
    prompts: Sequence[str]
    int8: bool = False
    positions: int | None = None
    layers_per_block: int | None = None

    def contents(self, on_rows: OnRows | None) -> Contents:
        """See :class:`export.bundle.exportable.Exportable`; no accuracy is measured.

        Raises:
            UsageError: the directory is no causal language model, ``positions`` are more than it has, the blocks are
                too many or too large, or no prompt has a clear text.
        """
        model = load_backbone(self.directory)
        config = model.config.get_text_config()
        layers_per_block = self._checked_layers(model, config.num_hidden_layers)
        definition = _tokenizer_of(self.directory)
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
            cache=tuple(CacheTensor(past=past, new=new) for past, new in cache_names(range(config.num_hidden_layers))),
            positions=positions,
            max_tokens=min(_DEFAULT_TOKENS, positions // 2),
            end_tokens=end_tokens(model),
        )
        tokenizer = load_tokenizer(definition, str(self.directory / TOKENIZER))
        texts = greedy_of_model(model, tokenizer, self.prompts, program)
        references = clearest(texts, _GOLDEN_ROWS, FULL)
        calibration = [[*text.ids, *text.tokens] for text in texts] if self.int8 else []
        blocks = DecoderGraph(model).blocks(layers_per_block)
        program = replaced(program, hidden=tuple(block.gives for block in blocks[:-1]))
        decoders = decoders_of(blocks, config.vocab_size, positions, calibration)
        files: dict[str, File] = {TOKENIZER: definition, **decoders.goldens, **decoders.models}
        tiers = []
        for tier, artifacts in decoders.artifacts.items():
            with ExitStack() as stack:
                runners = [
                    stack.enter_context(closing(OnnxRuntimeRunner(decoders.models[one.file].data, subject=one.file)))
                    for one in artifacts
                    if one.runtime == "onnxruntime"
                ]
                generate = stack.enter_context(closing(Generate(program, {FULL: runners}, tokenizer, _IDS, _MASK)))
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

    def _checked_layers(self, model: Any, layers: int) -> int:
        """Return the most layers of a block; raise a UsageError if there are too many blocks, or one is too large."""
        most, least = self.layers_per_block, -(-layers // MOST_BLOCKS)
        if most is None:
            most = layers
        if most < least:
            expected = f"{least} or more, for at most {MOST_BLOCKS} blocks of {layers} layers"
            raise UsageError("--layers-per-block", given=most, expected=expected, fix="Raise it, or leave it out.")
        size_bytes = 4 * max(left_parameters(model, range(layers)[at : at + most]) for at in range(0, layers, most))
        if size_bytes > _MOST_ONNX_BYTES:
            fix = "Reduce it, lower --layers-per-block, or take a smaller one: an ONNX file contains the weights."
            given, expected = Raw(f"{size_bytes:,} bytes of weights in FP32"), f"at most {_MOST_ONNX_BYTES:,} in a file"
            raise UsageError(f"{self.directory}", given=given, expected=expected, fix=fix)
        return most


def origin_of(identity: BaseIdentity) -> str:
    """Return how the record of a bundle names the language model that it was made from."""
    return f"{identity.name}, SHA-256 {identity.sha256}"


def is_origin(origin: str, identity: BaseIdentity) -> bool:
    """Return whether a record names a language model so, whose directory may have another name now."""
    return origin.rpartition(", SHA-256 ")[2] == identity.sha256


def decoders_of(
    blocks: Sequence[DecoderGraph], vocabulary: int, positions: int, calibration: Sequence[Sequence[int]] = ()
) -> Decoders:
    """Return graphs for ``positions`` tokens in FP32, FP16 and, with a calibration, dynamic INT8.

    Args:
        blocks: of the decoder; a single one is the whole decoder.
        calibration: tokens of prompts with their texts, to find the products that INT8 leaves in FP32.

    Raises:
        GoldenError: a file computes other logits than torch.
    """
    decoders = Decoders({}, {}, {})
    sequences: list[Array] = [np.array([tokens]) for tokens in calibration]
    step_goldens = _step_goldens(blocks, vocabulary)
    for block, role, step_golden in zip(blocks, backbone_roles(len(blocks)), step_goldens, strict=True):
        plain = decoder_onnx(block)
        cache = {name for past, new, _ in block.caches() for name in (past, new)}
        goldens = {f"{role}.golden.npz": step_golden, f"{role}.fp16.golden.npz": _in_fp16(step_golden, cache)}
        joined = half(join_caches(plain, block.heads_per_key), fp16_tensors=cache)
        made = [(FULL, "onnxruntime", "fp32", fused(plain)), (FULL, "tensorrt", "fp16", joined)]
        if sequences:
            feeds = [_alone(block, sequence) for sequence in sequences]
            has_head = block.gives == LOGITS and b"LayerNormalization" in plain
            made.append((int8_tier(FULL), "onnxruntime", "int8", dynamic_int8(plain, feeds, has_head=has_head)))
            if block.gives != LOGITS:
                sequences = [golden_of(block, of, _outputs(block)).outputs[block.gives] for of in feeds]
        profile, step_profile = profiles_of(block, positions)
        for tier, runtime, precision, data in made:
            file = f"{tier if len(blocks) == 1 else f'{tier}.{role}'}.{runtime}.{precision}.onnx"
            kind, suffix = ("FP16", ".fp16") if precision == "fp16" else ("FP32", "")
            golden = f"{role}{suffix}.golden.npz"
            decoders.models[file] = exported = checked_file(
                data,
                goldens[golden],
                file,
                runtime,
                precision,
                role=role,
                golden=golden,
                profile=profile,
                more_profiles=(step_profile,),
                **_tensors(block, vocabulary, kind),
            )
            decoders.artifacts[tier] = (*decoders.artifacts.get(tier, ()), exported.artifact)
        decoders.goldens.update(goldens)
    return decoders


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
    states = () if graph.reads == TOKENS else (graph.states,)
    sequence = Profile(*((count, size, *states) for count, size in zip(rows, tokens, strict=True)))
    profile = {graph.reads: sequence, **dict.fromkeys(graph.columns, column)}
    for past, _, heads in graph.caches():
        profile[past] = Profile(*((count, heads, size, graph.width) for count, size in zip(rows, places, strict=True)))
    return profile


def _tensors(graph: DecoderGraph, vocabulary: int, cache: str) -> dict[str, Any]:
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {TOKENS: ("INT64", (-1, -1)), LOGITS: ("FP32", (-1, vocabulary))}
    states = ("FP32", (-1, -1, graph.states))
    reads, gives = ([TensorSpec(name, *kinds.get(name, states))] for name in (graph.reads, graph.gives))
    reads += [TensorSpec(name, "INT64", (-1, 1)) for name in graph.columns]
    for past, new, heads in graph.caches():
        for specs, name in ((reads, past), (gives, new)):
            specs.append(TensorSpec(name, cache, (-1, heads, -1, graph.width)))
    return {"inputs": tuple(reads), "outputs": tuple(gives)}


def _outputs(graph: DecoderGraph) -> list[str]:
    return [graph.gives, *(new for _, new, _ in graph.caches())]


def _alone(graph: DecoderGraph, sequence: Array) -> dict[str, Array]:
    """Return the inputs for rows of tokens, or of states, as long as each other, behind an empty cache."""
    rows, tokens = sequence.shape[:2]
    columns: dict[str, Array] = {LENGTHS: np.zeros((rows, 1), np.int64), LAST: np.full((rows, 1), tokens - 1)}
    past = {name: np.zeros((rows, heads, 1, graph.width), np.float32) for name, _, heads in graph.caches()}
    return {graph.reads: sequence, **{name: columns[name] for name in graph.columns}, **past}


def _step_goldens(blocks: Sequence[DecoderGraph], vocabulary: int) -> list[Golden]:
    """Return random tokens behind a cache of a prompt with random tokens, partly filled, and each block's outputs."""
    random = np.random.default_rng(0)
    rows, places, tokens = 2, 8, 3
    sequence: Array = random.integers(0, vocabulary, (rows, tokens))
    columns: dict[str, Array] = {LENGTHS: np.array([[places], [places - 3]]), LAST: np.array([[tokens - 1], [0]])}
    prompt: Array = random.integers(0, vocabulary, (rows, places))
    goldens = []
    for block in blocks:
        outputs = golden_of(block, _alone(block, prompt), _outputs(block)).outputs
        past = {name: outputs[new] for name, new, _ in block.caches()}
        inputs = {block.reads: sequence, **{name: columns[name] for name in block.columns}, **past}
        goldens.append(golden_of(block, inputs, _outputs(block)))
        prompt, sequence = outputs[block.gives], goldens[-1].outputs[block.gives]
    return goldens


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
