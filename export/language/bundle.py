"""Export of a causal language model of Hugging Face's transformers to a bundle that generates text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edge.bundles.golden import check_outputs
from edge.bundles.manifest import Manifest, Profile, Tier, Tolerance
from edge.bundles.preprocess import load_tokenizer
from edge.bundles.programs import CacheTensor, GenerateProgram
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import TensorSpec
from edge.errors import Raw, UsageError
from edge.programs.factory import golden_options
from edge.programs.generate import Generate
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exportable import Contents, export_bundle
from export.bundle.exported import FULL, Exported
from export.generate.backbone import load_backbone
from export.generate.base import BaseIdentity, identity_of
from export.generate.decoder import LAST, LENGTHS, LOGITS, TOKENS, DecoderGraph, cache_names
from export.generate.decoder_artifacts import MAX_BATCH_SIZE, decoders_of
from export.generate.decoding import end_tokens
from export.generate.golden_texts import clearest, golden_of_texts, greedy_of_file, greedy_of_model
from export.generate.parts import left_parameters
from export.training.provenance import provenance

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Tokens of prompt and text together, unless the model has fewer positions: the cache grows with them.
MOST_POSITIONS = 1024
_TOKENIZER, _GOLDEN = "tokenizer.json", "golden.npz"
_PROMPT, _IDS, _MASK, _TEXT, _GENERATED = "prompt", "ids", "mask", "text", "generated"
#: Longer texts are refused before they are tokenized; no usual token has more bytes on average.
_BYTES_PER_TOKEN = 16
_DEFAULT_TOKENS = 64
#: Protocol Buffers, and so an ONNX file, end at 2 GiB; the graph needs some of it.
_MOST_ONNX_BYTES = 2**31 - 2**24
#: Golden prompts at most.
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
        prompts: of the kind that the model is for; the clearest ones become golden.
        int8: whether there is a tier in INT8 too, for ONNX Runtime on the CPU.
        positions: tokens of prompt and text together; None is as many as the model has, 1,024 at most.

    Raises:
        UsageError: the directory is no causal language model, ``positions`` are more than it has, or no prompt has a
            clear text.
        GoldenError: ONNX Runtime's logits or texts differ from torch's.
    """
    model = load_backbone(directory)
    size_bytes = 4 * left_parameters(model)
    if size_bytes > _MOST_ONNX_BYTES:
        fix = "Reduce it, or take a smaller one: a bundle's ONNX file contains the weights."
        given = Raw(f"{size_bytes:,} bytes of weights in FP32")
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
        end_tokens=end_tokens(model),
    )
    tokenizer = load_tokenizer(definition, str(directory / _TOKENIZER))
    references = clearest(greedy_of_model(model, tokenizer, prompts, program), _GOLDEN_ROWS, FULL)
    decoders = decoders_of(DecoderGraph(model), config.vocab_size, positions, int8=int8)
    files = {_TOKENIZER: definition} | decoders.files
    tiers = []
    for tier, artifacts in decoders.artifacts.items():
        with _generating(program, files[artifacts[0].file], tokenizer) as generate:
            # INT8 may lead to other texts. Rows that run together share its scales, so one row stands alone.
            own = greedy_of_file(generate, FULL, references) if tier != FULL else []
            texts = clearest(own, 1, tier) if own else references
            golden = golden_of_texts(texts, tokenizer, program, tokenize, definition)
            outputs = generate.compute(golden.inputs, golden_options(program, FULL, golden)).outputs
        check_outputs(outputs, golden, Tolerance(atol=0, rtol=0), f"{tier} on ONNX Runtime")
        golden_file = f"{tier}.{_GOLDEN}" if own else _GOLDEN
        files[golden_file] = golden.encode()
        tiers.append(Tier(name=tier, artifacts=artifacts, golden=golden_file if own else None))
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
    contents = Contents(manifest, files, decoders.differences)
    return export_bundle(contents, repository, version=version, replace=replace)


def origin_of(identity: BaseIdentity) -> str:
    """Return how the record of a bundle names the language model that it was made from."""
    return f"{identity.name}, SHA-256 {identity.sha256}"


def is_origin(origin: str, identity: BaseIdentity) -> bool:
    """Return whether a record names a language model so, whose directory may have another name now."""
    return origin.rpartition(", SHA-256 ")[2] == identity.sha256


def _tokenizer_of(directory: Path) -> bytes:
    try:
        return (directory / _TOKENIZER).read_bytes()
    except OSError as error:
        fix = "Save it with the tokenizer's save_pretrained."
        raise UsageError(f"{directory / _TOKENIZER}", given=Raw(error), expected="a file", fix=fix) from None


@contextmanager
def _generating(program: GenerateProgram, onnx: bytes, tokenizer: Tokenizer) -> Iterator[Generate]:
    """Load a file on ONNX Runtime during the block, as the one tier ``FULL``."""
    with (
        closing(OnnxRuntimeRunner(onnx, subject="a decoder")) as runner,
        closing(Generate(program, {FULL: runner}, tokenizer, _IDS, _MASK)) as generate,
    ):
        yield generate
