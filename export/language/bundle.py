"""Export of a causal language model of Hugging Face's transformers to a bundle that generates text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden, check_outputs
from edge.bundles.manifest import Artifact, Manifest, Profile, Tier, TokenizerPreprocess, Tolerance
from edge.bundles.preprocess import TokenizerPreprocessor, load_tokenizer
from edge.bundles.programs import CacheTensor, GenerateProgram
from edge.datatypes import Array, TensorSpec
from edge.errors import Literally, UsageError
from edge.programs.generate import Generate
from edge.programs.program import Options
from edge.runtimes.decoder_cache import FEWEST_PLACES
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import OPSET, golden_of, largest_difference
from export.exported import FULL, Exported
from export.language.backbone import load_backbone
from export.language.base import BaseIdentity, identity_of
from export.language.decoder import LAST, LENGTHS, LOGITS, TOKENS, DecoderGraph, cache_names, decoder_onnx
from export.precision import dynamic_int8, fused, half
from export.provenance import provenance
from export.runtimes import allowed_tolerance, worst_tolerance

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BATCH_SIZE = 8
#: Tokens of prompt and text together, unless the model has fewer positions: the cache grows with them.
MOST_POSITIONS = 1024
_PROMPT, _IDS, _MASK, _TEXT, _GENERATED = "prompt", "ids", "mask", "text", "generated"
_TOKENIZER, _GOLDEN, _STEP_GOLDEN = "tokenizer.json", "golden.npz", "backbone.golden.npz"
_FP16_GOLDEN = "backbone.fp16.golden.npz"
#: Longer texts are refused before they are tokenized; no usual token has more bytes on average.
_BYTES_PER_TOKEN = 16
_DEFAULT_TOKENS = 64
#: Tokens of a prompt that TensorRT tunes for.
_USUAL_PROMPT = 128
#: The smallest, the best and the largest number of something.
_Sizes = tuple[int, int, int]
#: Protocol Buffers, and so an ONNX file, end at 2 GiB; the graph needs some of it.
_MOST_ONNX_BYTES = 2**31 - 2**24
#: Golden prompts: those whose greedy texts are clearest, because other machines round otherwise.
_GOLDEN_ROWS = 4


def export_language_model(
    directory: Path,
    repository: str | Path,
    name: str,
    *,
    prompts: Sequence[str],
    int8: bool = False,
    positions: int | None = None,
    version: int = 1,
    replace: bool = False,
) -> Exported:
    """Write the bundle ``repository/<name>-<version>`` of a model directory.

    Args:
        directory: of transformers: config.json, weights as safetensors, and tokenizer.json.
        prompts: of the kind that the model is for, at least four; the clearest ones become golden.
        int8: whether there is a tier in INT8 too, for ONNX Runtime on the CPU.
        positions: tokens of prompt and text together; None is as many as the model has, 1,024 at most.

    Raises:
        UsageError: the directory is no causal language model, or ``positions`` are more than it has.
        GoldenError: ONNX Runtime's logits or texts differ from torch's.
    """
    model = load_backbone(directory)
    size_bytes = 4 * sum(one.numel() for one in model.parameters())
    if size_bytes > _MOST_ONNX_BYTES:
        fix = "Take a smaller model: a bundle's ONNX file contains its weights."
        given = Literally(f"{size_bytes:,} bytes of weights in FP32")
        raise UsageError(f"{directory}", given=given, expected=f"at most {_MOST_ONNX_BYTES:,}", fix=fix)
    definition = _tokenizer_of(directory)
    config = model.config.get_text_config()
    most = int(config.max_position_embeddings)
    positions = min(most, MOST_POSITIONS) if positions is None else positions
    if not 2 <= positions <= most:
        fix = "Leave --positions out."
        raise UsageError("--positions", given=positions, expected=f"2 to {most}, the model's", fix=fix)
    tokenize = TokenizerPreprocess(
        input=_PROMPT,
        file=_TOKENIZER,
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
        end_tokens=_end_tokens(model),
    )
    tokenizer = load_tokenizer(definition, str(directory / _TOKENIZER))
    references = _references(model, tokenizer, prompts, program)
    graph = DecoderGraph(model)
    plain = decoder_onnx(graph)
    golden = _golden(references, tokenizer, tokenize, definition)
    step_golden = _step_golden(graph, config.vocab_size)
    cache = {name for pair in cache_names(graph.layers) for name in pair}
    goldens = {_STEP_GOLDEN: step_golden, _FP16_GOLDEN: _in_fp16(step_golden, cache)}
    files = {_TOKENIZER: definition, _GOLDEN: golden.encode()}
    files |= {file: one.encode() for file, one in goldens.items()}
    made = {FULL: [("onnxruntime", "fp32", fused(plain)), ("tensorrt", "fp16", half(plain, fp16_tensors=cache))]}
    if int8:
        made[f"{FULL}-int8"] = [("onnxruntime", "int8", dynamic_int8(plain, has_head=b"LayerNormalization" in plain))]
    profile, step_profile = profiles_of(graph, positions)
    tiers, largest = [], 0.0
    for tier, steps in made.items():
        artifacts = []
        for runtime, precision, data in steps:
            file = f"{tier}.{runtime}.{precision}.onnx"
            kind, own_golden = ("FP16", _FP16_GOLDEN) if precision == "fp16" else ("FP32", _STEP_GOLDEN)
            difference = largest_difference(data, goldens[own_golden], worst_tolerance(step_golden, precision), file)
            largest = max(largest, difference)
            files[file] = data
            artifacts.append(
                Artifact(
                    file=file, runtime=runtime, precision=precision, opset=OPSET, role="backbone",
                    tolerance=allowed_tolerance(step_golden, precision, difference), golden=own_golden,
                    profile=profile, more_profiles=(step_profile,), **_tensors(graph, config.vocab_size, kind),
                )
            )  # fmt: skip
        outputs, own = _texts_of(program, steps[0][2], tokenizer, golden), None
        if tier == FULL:
            check_outputs(outputs, golden, Tolerance(atol=0, rtol=0), f"{tier} on ONNX Runtime")
        else:  # INT8 may lead to other texts
            own = f"{tier}.{_GOLDEN}"
            files[own] = msgspec.structs.replace(golden, outputs=outputs).encode()
        tiers.append(Tier(name=tier, artifacts=tuple(artifacts), golden=own))
    shape = Profile(min=(1, 1), opt=(1, min(32, positions - 1)), max=(MAX_BATCH_SIZE, positions - 1))
    manifest = Manifest(
        name=name,
        version=version,
        description=f"{type(model).__name__} of {sum(one.numel() for one in model.parameters()):,} parameters",
        inputs=tuple(TensorSpec(tensor, "INT64", (-1, -1)) for tensor in (_IDS, _MASK)),
        outputs=(TensorSpec(_TEXT, "BYTES", (-1, 1)), TensorSpec(_GENERATED, "INT32", (-1, 1))),
        max_batch_size=MAX_BATCH_SIZE,
        profile={_IDS: shape, _MASK: shape},
        tiers=tuple(tiers),
        golden=_GOLDEN,
        files={},
        provenance=provenance(trainer=origin_of(identity_of(directory)), data="see the model", seed=None),
        preprocess=tokenize,
        program=program,
    )
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    onnx_bytes = sum(len(data) for file, data in files.items() if file.endswith(".onnx"))
    return Exported(str(written.path), largest, onnx_bytes)


def origin_of(identity: BaseIdentity) -> str:
    """Return how the record of a bundle names the language model that it was made from."""
    return f"{identity.name}, weights {identity.sha256}"


def _tokenizer_of(directory: Path) -> bytes:
    try:
        return (directory / _TOKENIZER).read_bytes()
    except OSError as error:
        fix = "Save it with the tokenizer's save_pretrained."
        raise UsageError(f"{directory / _TOKENIZER}", given=Literally(error), expected="a file", fix=fix) from None


def _end_tokens(model: Any) -> tuple[int, ...]:
    found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.eos_token_id
    tokens = found if isinstance(found, (list, tuple)) else [] if found is None else [found]
    return tuple(int(token) for token in tokens)


def _tensors(graph: DecoderGraph, vocabulary: int, cache: str) -> dict[str, tuple[TensorSpec, ...]]:
    names, shape = cache_names(graph.layers), (-1, graph.key_heads, -1, graph.width)
    columns = [TensorSpec(name, "INT64", (-1, 1)) for name in (LENGTHS, LAST)]
    reads = (TensorSpec(TOKENS, "INT64", (-1, -1)), *columns, *(TensorSpec(past, cache, shape) for past, _ in names))
    gives = (TensorSpec(LOGITS, "FP32", (-1, vocabulary)), *(TensorSpec(new, cache, shape) for _, new in names))
    return {"inputs": reads, "outputs": gives}


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
    cache = Profile(*((count, graph.key_heads, size, graph.width) for count, size in zip(rows, places, strict=True)))
    found = {TOKENS: Profile(*zip(rows, tokens, strict=True)), LENGTHS: column, LAST: column}
    return found | {past: cache for past, _ in cache_names(graph.layers)}


def _step_golden(graph: DecoderGraph, vocabulary: int) -> Golden:
    """Return random tokens behind a cache of a prompt with random tokens, partly filled, and the graph's outputs."""
    random = np.random.default_rng(0)
    rows, places, tokens = 2, 8, 3
    columns: list[tuple[str, Array]] = [
        (TOKENS, random.integers(0, vocabulary, (rows, tokens))),
        (LENGTHS, np.array([[places], [places - 3]])),
        (LAST, np.array([[tokens - 1], [0]])),
    ]
    names = cache_names(graph.layers)
    prompt = torch.from_numpy(random.integers(0, vocabulary, (rows, places)))
    nothing = torch.zeros(rows, graph.key_heads, 1, graph.width)
    with torch.no_grad():
        _, *past = graph(prompt, torch.zeros(rows, 1, dtype=torch.int64), torch.full((rows, 1), places - 1),
                         *[nothing] * len(names))  # fmt: skip
    inputs = dict(columns) | {name: tensor.numpy() for (name, _), tensor in zip(names, past, strict=True)}
    return golden_of(graph, inputs, [LOGITS, *(new for _, new in names)])


def _in_fp16(golden: Golden, cache: Collection[str]) -> Golden:
    """Return a golden set whose tensors of the cache are rounded to FP16."""
    reads, gives = (
        {name: array.astype(np.float16) if name in cache else array for name, array in arrays.items()}
        for arrays in (golden.inputs, golden.outputs)
    )
    return Golden(reads, gives)


class _Reference(NamedTuple):
    """What transformers itself generates: the greedy tokens of a prompt, and the smallest lead of a token."""

    prompt: str
    ids: list[int]
    tokens: list[int]
    lead: float


def _references(model: Any, tokenizer: Tokenizer, prompts: Sequence[str], program: GenerateProgram) -> list[_Reference]:
    """Return the clearest texts, those whose least clear token leads the second choice by most."""
    found = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        room = program.positions - len(ids)
        if room < 1:
            continue
        tokens = min(program.max_tokens, room)
        made = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=tokens, return_dict_in_generate=True,
            output_logits=True, attention_mask=torch.ones(1, len(ids), dtype=torch.int64), pad_token_id=0,
        )  # fmt: skip
        best = torch.cat(made.logits).topk(2, dim=1).values
        lead = float((best[:, 0] - best[:, 1]).min())
        found.append(_Reference(prompt, ids, made.sequences[0, len(ids) :].tolist(), lead))
    if not found:
        expected = f"some of less than {program.positions} tokens"
        given, fix = (
            Literally("prompts that leave no room for a text"),
            "Give --data with shorter ones, or --positions.",
        )
        raise UsageError("golden prompts", given=given, expected=expected, fix=fix)
    return sorted(found, key=lambda one: -one.lead)[:_GOLDEN_ROWS]


def _golden(references: Sequence[_Reference], tokenizer: Tokenizer, config: TokenizerPreprocess, json: bytes) -> Golden:
    raw = np.array([[one.prompt.encode()] for one in references], np.object_)
    inputs = TokenizerPreprocessor(config, json, _TOKENIZER, cut=False)(raw)
    texts = np.array([[tokenizer.decode(one.tokens).encode()] for one in references])
    generated = np.array([[len(one.tokens)] for one in references], np.int32)
    return Golden(inputs, {_TEXT: texts, _GENERATED: generated}, {_PROMPT: raw.astype(np.bytes_)})


def _texts_of(program: GenerateProgram, onnx: bytes, tokenizer: Tokenizer, golden: Golden) -> dict[str, Array]:
    """Return what a file makes of the golden prompts on ONNX Runtime."""
    runner = OnnxRuntimeRunner(onnx, subject="a decoder")
    generate = Generate(program, {FULL: runner}, tokenizer, _IDS, _MASK)
    try:
        return generate.compute(golden.inputs, Options(FULL)).outputs
    finally:
        generate.close()
        runner.close()
