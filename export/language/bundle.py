"""Export of a causal language model of Hugging Face's transformers to a bundle that generates text."""

from __future__ import annotations

from collections.abc import Sequence
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
from edge.runtimes.host_decoder import FEWEST_PLACES
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
#: Longer texts are refused before they are tokenized; no usual token has more bytes on average.
_BYTES_PER_TOKEN = 16
_DEFAULT_TOKENS = 64
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
    files = {_TOKENIZER: definition, _GOLDEN: golden.encode(), _STEP_GOLDEN: step_golden.encode()}
    made = {FULL: [("onnxruntime", "fp32", fused(plain)), ("tensorrt", "fp16", half(plain))]}
    if int8:
        made[f"{FULL}-int8"] = [("onnxruntime", "int8", dynamic_int8(plain, has_head=b"LayerNormalization" in plain))]
    tiers, largest = [], 0.0
    for tier, steps in made.items():
        artifacts = []
        for runtime, precision, data in steps:
            file = f"{tier}.{runtime}.{precision}.onnx"
            difference = largest_difference(data, step_golden, worst_tolerance(step_golden, precision), file)
            largest = max(largest, difference)
            files[file] = data
            artifacts.append(
                Artifact(
                    file=file, runtime=runtime, precision=precision, opset=OPSET, role="backbone",
                    tolerance=allowed_tolerance(step_golden, precision, difference), golden=_STEP_GOLDEN,
                    profile=_profile(graph, positions), **_tensors(graph, config.vocab_size),
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


def _tensors(graph: DecoderGraph, vocabulary: int) -> dict[str, tuple[TensorSpec, ...]]:
    reads = [TensorSpec(TOKENS, "INT64", (-1, -1)), *(TensorSpec(name, "INT64", (-1, 1)) for name in (LENGTHS, LAST))]
    gives = [TensorSpec(LOGITS, "FP32", (-1, vocabulary))]
    for past, new, heads in graph.caches():
        for specs, name in ((reads, past), (gives, new)):
            specs.append(TensorSpec(name, "FP32", (-1, heads, -1, graph.width)))
    return {"inputs": tuple(reads), "outputs": tuple(gives)}


def _profile(graph: DecoderGraph, positions: int) -> dict[str, Profile]:
    most = max(FEWEST_PLACES, 1 << (positions - 1).bit_length())  # the places of a cache
    column = Profile(min=(1, 1), opt=(1, 1), max=(MAX_BATCH_SIZE, 1))
    sizes = ((1, 1), (1, min(64, most)), (MAX_BATCH_SIZE, most))
    found = {
        TOKENS: Profile(min=(1, 1), opt=(1, 1), max=(MAX_BATCH_SIZE, positions - 1)),
        LENGTHS: column,
        LAST: column,
    }
    for past, _, heads in graph.caches():
        found[past] = Profile(*((rows, heads, length, graph.width) for rows, length in sizes))
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
