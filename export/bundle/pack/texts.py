"""A packed model that reads token ids: its tokenizer, what becomes its embedding, and golden texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge.bundles.manifest import Profile
from edge.bundles.preprocess import TokenizerPreprocessor, Tokens
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import Array, TensorSpec
from edge.errors import InvalidRequest, Raw, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.pack.golden import outputs_of
from export.bundle.pack.graph import datatype_name
from export.bundle.pack.steps import Arrays
from export.data.unlabelled import MAX_TEXT_BYTES, read_texts, sample_texts
from export.training.runs import TOKENIZER

if TYPE_CHECKING:
    from onnx import ModelProto

    from export.bundle.pack.nodes import Pooling
    from export.importing.embedder import Embedder

#: Names of a graph's inputs; those of transformers, whatever the architecture.
IDS, MASK, SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
#: Names of outputs that have a vector for each token, and of those that are embeddings, of which a pooled one gets the
#: first.
TOKEN_VECTORS = ("last_hidden_state", "token_embeddings")
EMBEDDINGS = ("sentence_embedding", "embedding")
#: Names of sentence-transformers for ways of pooling, by ours.
POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "summary": "cls"}
#: Name of our texts in the provenance and in the output of the command.
SAMPLES = "sample texts"
#: Golden texts, and usual tokens of a text, which runtimes tune for.
_ROWS, _USUAL_TOKENS = 32, 32
#: Attention over more tokens may take gigabytes on the workstation.
_LONGEST_CHECKED = 2048
#: Usual names of padding, for a tokenizer.json that does not say which token it is.
_PADDING = ("[PAD]", "<pad>")


class Texts(NamedTuple):
    """What turns the texts of clients into the inputs of a graph.

    Attributes:
        definition: the ``tokenizer.json``.
        largest_id: of its tokens, whose numbers may have gaps.
    """

    step: TokenizerPreprocess
    definition: bytes
    tokenize: TokenizerPreprocessor
    largest_id: int

    def shapes(self, max_batch_size: int) -> dict[str, Profile]:
        """Return the least, usual and largest shape of each input of the graph."""
        most = self.step.max_length
        shape = Profile(min=(1, 1), opt=(1, min(_USUAL_TOKENS, most)), max=(max_batch_size, most))
        return dict.fromkeys(self.step.graph_inputs, shape)

    def read(self, option: str, path: Path | None) -> tuple[Arrays, Arrays]:
        """Return texts [N, 1], and what the graph reads of them [N, tokens], by their inputs' names.

        Args:
            option: that names the file, for errors.
            path: a file with a text in each line, of which the first 32 count; None for some of ours.

        Raises:
            DataError: the file cannot be read, or has fewer than two texts.
        """
        column = np.array([[text.encode()] for (text,) in _found(path)[:_ROWS]], np.object_)
        return {self.step.input: column.astype(np.bytes_)}, self.tokenize(column)

    def read_alone(self, path: Path | None, *, golden: bool) -> list[Arrays]:
        """Return what the graph reads of each text of a file, alone: padding must not enter the ranges of INT8.

        Args:
            golden: whether only the texts count that :meth:`read` returns.
        """
        found = _found(path)[: _ROWS if golden else None]
        return [self.tokenize(np.array([[text.encode()]], np.object_)) for (text,) in found]

    def check(self, runner: OnnxRuntimeRunner, model: Path) -> None:
        """Raise a UsageError unless the graph takes the tokenizer's largest id, and the longest text."""
        # TensorRT reports neither an id nor a position that is outside of its table.
        fix = "Give the tokenizer that the model was trained with."
        subject = f"tokenizer of {self.tokenize.vocabulary_size} tokens for {model}"
        self._run(runner, np.full(2, self.largest_id), subject, "a row of the embedding table for each id", fix)
        most = self.step.max_length
        if most > _LONGEST_CHECKED:
            return
        fix = f"Give --max-length with the number of positions that the model has, below {most}."
        self._run(runner, np.zeros(most), f"text of {most} tokens for {model}", "outputs for it", fix)

    def _run(self, runner: OnnxRuntimeRunner, ids: Array, subject: str, expected: str, fix: str) -> None:
        row = Tokens(ids.astype(np.int64), np.zeros(ids.shape, np.int64), np.zeros((0, 2), np.int64))
        try:
            outputs_of(runner, self.tokenize.padded([row]), 1, subject, fix)
        except InvalidRequest as error:
            given = Raw(f"{error.given}, outside of {error.expected}")
            raise UsageError(subject, given=given, expected=expected, fix=fix) from None


def _found(path: Path | None) -> tuple[tuple[str, ...], ...]:
    return sample_texts(pair=False) if path is None else read_texts(path, pair=False)


def text_step(directory: Path, max_length: int | None, inputs: Sequence[TensorSpec]) -> Texts:
    """Return the step of a directory's tokenizer for a graph with these inputs.

    Args:
        directory: with ``tokenizer.json``, and perhaps ``tokenizer_config.json``.
        max_length: most tokens of a text; None takes the limit of the directory.

    Raises:
        UsageError: no limit is known, or it leaves no room for text.
        CheckpointError: a file of the directory is missing or malformed.
    """
    # They import torch, which no help needs.
    from export.data.tokens import load_tokenizer
    from export.importing.directory import tokenizer_limit

    tokenizer = load_tokenizer(directory)
    definition, special = tokenizer.to_str().encode(), tokenizer.num_special_tokens_to_add(is_pair=False)
    most = max_length or tokenizer_limit(directory)
    if most is None:
        expected, fix = f"the limit of the model, which {directory} does not state", "Give it, such as 512."
        raise UsageError("--max-length", given=Raw("nothing"), expected=expected, fix=fix)
    if most <= special:
        expected, fix = f"more than the {special} that the tokenizer adds to a text", "Give a larger number."
        raise UsageError("--max-length", given=most, expected=expected, fix=fix)
    step = TokenizerPreprocess(
        input="text",
        file=TOKENIZER,
        ids=IDS,
        mask=MASK,
        segments=SEGMENTS if any(spec.name == SEGMENTS for spec in inputs) else None,
        max_length=most,
        pad_id=_pad_id((directory / TOKENIZER).read_text(encoding="utf-8")),
        max_text_bytes=MAX_TEXT_BYTES,
    )
    largest_id = max(tokenizer.get_vocab().values(), default=0)
    return Texts(step, definition, TokenizerPreprocessor(step, definition, f"{directory}"), largest_id)


def _pad_id(definition: str) -> int:
    """Return the id of padding, from which models of RoBERTa type count positions."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    if tokenizer.padding:
        return int(tokenizer.padding["pad_id"])
    return next((number for name in _PADDING if (number := tokenizer.token_to_id(name)) is not None), 0)


def with_embedding(model: ModelProto, path: Path, pooling: Pooling | None, *, normalize: bool) -> None:
    """Change a graph that reads token ids, so that its only output is the embedding of a text, if it has one.

    Without ``pooling``, it must have an embedding already, or neither that nor vectors of tokens; the outputs of such a
    graph, like the logits of a classifier, stay as they are.

    Raises:
        UsageError: the graph has other inputs than token ids and their masks, or no output that the options fit.
    """
    from export.bundle.pack.nodes import embed

    _check_inputs(model, path)
    sizes = {one.name: [size.dim_value for size in one.type.tensor_type.shape.dim] for one in model.graph.output}
    names, rank = (TOKEN_VECTORS, 3) if pooling else (EMBEDDINGS, 2)
    asked = f"--pooling {pooling}" if pooling else "--normalize" if normalize else ""
    fitting = [name for name, size in sizes.items() if len(size) == rank and size[-1]]
    read = [name for name in names if name in fitting] or (fitting if asked and len(fitting) == 1 else [])
    if read:
        output = read[0] if read[0] in EMBEDDINGS else EMBEDDINGS[0]
        embed(model, read[0], MASK, pooling, normalize=normalize, output=output)
    elif asked:
        shape = "[batch, tokens, width]" if pooling else "[batch, width]"
        expected = f"an output {shape} of a fixed width, of several one named {' or '.join(names)}"
        fix = f"Leave {asked} out, or export the model with such an output."
        raise UsageError(f"outputs of {path} for {asked}", given=sizes, expected=expected, fix=fix)
    elif vectors := [name for name in TOKEN_VECTORS if name in sizes]:
        expected = f"mean or cls, because {vectors[0]!r} of {path} is a vector for each token"
        fix = "Give the way that the model was trained with, which is mean for most that embed sentences."
        raise UsageError("--pooling", given=Raw("nothing"), expected=expected, fix=fix)


def _check_inputs(model: ModelProto, path: Path) -> None:
    shown, weights = {}, {one.name for one in model.graph.initializer}
    for one in [one for one in model.graph.input if one.name not in weights]:
        tensor = one.type.tensor_type
        shown[one.name] = f"{datatype_name(tensor.elem_type)} {[size.dim_value or -1 for size in tensor.shape.dim]}"
    if not {IDS, MASK} <= shown.keys() <= {IDS, MASK, SEGMENTS} or {*shown.values()} != {"INT64 [-1, -1]"}:
        expected = f"{IDS}, {MASK} and perhaps {SEGMENTS}, each INT64 [-1, -1]"
        fix = "Export the model with these names and dynamic numbers of texts and tokens, or leave --tokenizer out."
        raise UsageError(f"inputs of {path} for --tokenizer", given=shown, expected=expected, fix=fix)


def read_directory(directory: Path) -> tuple[Path, Embedder | None]:
    """Return the ONNX file of a Hugging Face directory, and what ``modules.json`` says, if it is there.

    Raises:
        UsageError: there is no such file, the model reads pairs of texts, or there are layers behind the pooling, which
            the file does not have.
        CheckpointError: a module is not supported.
    """
    # They import torch, which no help needs.
    from export.importing.directory import ONNX_FILES
    from export.importing.embedder import MODULES, read_embedder

    found = [path for path in (directory / place for place in ONNX_FILES) if path.is_file()]
    if not found:
        given, expected = Raw("a directory without them"), f"{' or '.join(ONNX_FILES)} in a Hugging Face directory"
        fix = f"Give the ONNX file itself, or take the weights with 'fewheads import {directory} --out RUN'."
        if any(directory.glob("*/config.pbtxt")):
            fix = "Add --triton for a model repository of Triton."
        raise UsageError(f"MODEL {directory}", given=given, expected=expected, fix=fix)
    has_modules = (directory / MODULES).exists()
    embedder = read_embedder(directory) if has_modules else None
    if has_modules and not embedder:
        given, expected = Raw("a cross-encoder, which reads two texts together"), "a model of single texts"
        fix = f"Take the weights with 'fewheads import {directory} --pair --out RUN'."
        raise UsageError(f"MODEL {directory}", given=given, expected=expected, fix=fix)
    if embedder and embedder.embedding.dense:
        given, expected = Raw(f"{len(embedder.embedding.dense)} of type Dense"), "Transformer, Pooling and Normalize"
        fix = f"Take the weights with 'fewheads import {directory} --out RUN', which has these layers."
        raise UsageError(f"modules of {directory}", given=given, expected=expected, fix=fix)
    return found[0], embedder
