"""Processing on the device: text and images to tensors, so that clients may send these, and logits to labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from edge.bundles import arithmetic, expression, spans, text
from edge.bundles.bundle import Bundle
from edge.bundles.fields import EXPORT_AGAIN, require
from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import Manifest
from edge.bundles.programs import GenerateProgram
from edge.bundles.spans import Context
from edge.bundles.steps import (
    ArithmeticPreprocess,
    BoxPostprocess,
    ExpressionPreprocess,
    ImagePreprocess,
    LabelPostprocess,
    Preprocess,
    SpanPostprocess,
    TokenizerPreprocess,
)
from edge.datatypes import Array, TensorSpec
from edge.errors import BackendError, BundleError, InvalidRequest, Raw
from edge.protocol import PROBABILITIES

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


#: Texts up to this size are read in a few milliseconds.
_INLINE_BYTES: Final = 4096
#: Returns if the work for a request is still wanted.
GoOn = Callable[[], None]


def always() -> None:
    """Go on."""


class Preprocessor(Protocol):
    """Computes inputs of a graph. A client sends all ``inputs``, or ``graph_inputs``, never both."""

    inputs: tuple[TensorSpec, ...]  # texts, or encoded images
    graph_inputs: tuple[str, ...]
    largest: float | None  # absolute value in ``graph_inputs`` of any input; None without a limit
    tolerance: float  # by which ``graph_inputs`` may differ between machines

    def slow(self, size_bytes: int) -> bool:
        """Return whether inputs of so many bytes in all take milliseconds, so that no event loop may call this."""

    def __call__(self, *texts: Array, go_on: GoOn = always) -> dict[str, Array]:
        """Return the outputs for texts or encoded images, (rows, 1); raise an InvalidRequest if one is not valid.

        ``go_on`` is called before each row that takes long, and raises an error if the client has gone.
        """


class _TextPreprocessor:
    tolerance = 0.0

    def __init__(self, config: Preprocess, largest: float | None = None) -> None:
        self.inputs, self.graph_inputs, self.largest = config.inputs, config.graph_inputs, largest

    def slow(self, size_bytes: int) -> bool:
        return size_bytes > _INLINE_BYTES


class ExpressionPreprocessor(_TextPreprocessor):
    """Arithmetic text (BYTES, [-1, 1]) to a calculator's tokens; see :class:`Preprocessor`.

    ``tokenize`` takes texts and the largest operand and returns the outputs; ``code`` is the largest of its codes.
    """

    def __init__(
        self,
        config: ExpressionPreprocess | ArithmeticPreprocess,
        tokenize: Callable[[list[str], float], tuple[Array, ...]],
        code: float,
    ) -> None:
        super().__init__(config, max(config.max_abs_operand, code))
        self._tokenize = tokenize
        self._max_abs_operand = config.max_abs_operand

    def __call__(self, *texts: Array, go_on: GoOn = always) -> dict[str, Array]:
        decoded = text.decode_all(texts[0].ravel().tolist(), f"input {self.inputs[0].name!r}")
        return dict(zip(self.graph_inputs, self._tokenize(decoded, self._max_abs_operand), strict=True))


class Tokens(NamedTuple):
    """The tokens of one text or pair, special ones included."""

    ids: Array  # [tokens]
    segments: Array  # [tokens]
    offsets: Array  # [tokens, 2], and [0, 2] where the manifest asks for none


class TokenizerPreprocessor(_TextPreprocessor):
    """Text, or pairs of texts (BYTES, [-1, 1]), to token ids, mask, segments and offsets (INT64, [-1, tokens, …]).

    ``definition`` is the ``tokenizer.json``, ``subject`` its name in errors. Text that is too long is cut, or refused
    without ``cut``; text without tokens is refused. :meth:`windows` cuts nothing of a second text. Raise a BundleError
    if it is not a tokenizer or leaves no room for text in the manifest's ``max_length``, a BackendError without the
    package ``tokenizers``.
    """

    def __init__(self, config: TokenizerPreprocess, definition: bytes, subject: str, *, cut: bool = True) -> None:
        super().__init__(config)
        self.config = config
        self._tokenizer = load_tokenizer(definition, subject)
        self.vocabulary_size = self._tokenizer.get_vocab_size()
        self._cut = cut
        special = self._tokenizer.num_special_tokens_to_add(config.pair is not None)
        expected = f"more tokens than the {special} that the tokenizer adds"  # the library would raise, or cut nothing
        if config.windows:
            special += config.windows.question_tokens + config.windows.stride
            expected = f"more tokens than the {special} of the question, the stride and the tokenizer itself"
        require(config.max_length > special, subject, "max_length", config.max_length, expected)
        if cut and not config.windows:
            self._tokenizer.enable_truncation(config.max_length, strategy="longest_first")

    def __call__(self, *texts: Array, go_on: GoOn = always) -> dict[str, Array]:
        return self.padded(self.tokens(*texts, go_on=go_on))

    def tokens(self, *texts: Array, go_on: GoOn = always) -> list[Tokens]:
        """Return the tokens of each row, as a call does, but without padding, of which long texts make a lot.

        Of a text in several windows, these are those of the first.
        """
        if self.config.windows:
            return [rows[0] for rows, _ in self.windows(*texts, go_on=go_on)]
        rows = []
        for _, encoding in self._encoded(*texts, go_on=go_on):
            self._check_length(len(encoding.ids))  # one that is cut is too short only if it has no tokens
            # Only these, because an encoding also holds what was cut off.
            rows.append(_tokens(encoding.ids, encoding.type_ids, encoding.offsets if self.config.offsets else []))
        return rows

    def windows(self, *texts: Array, go_on: GoOn = always) -> Iterator[tuple[list[Tokens], Context]]:
        """Yield the tokens of each window of a row, and its second text; for a step with ``windows``."""
        assert self.config.windows
        for (_, context), encoding in self._encoded(*texts, go_on=go_on):
            rows, cut = spans.cut(context, encoding, self.config.max_length, self.config.windows)
            uncut = _tokens(encoding.ids, encoding.type_ids, encoding.offsets)
            yield [Tokens(*(array[indices] for array in uncut)) for indices in rows], cut

    def _encoded(self, *texts: Array, go_on: GoOn) -> Iterator[tuple[tuple[str, ...], Encoding]]:
        columns = [self._decoded(spec.name, column.ravel()) for spec, column in zip(self.inputs, texts, strict=True)]
        # Only the batch call lets Python's other threads run meanwhile; of one row, it needs one core.
        slow = self.slow(sum(map(len, chain(*columns))))
        for row in zip(*columns, strict=True):
            go_on()
            if slow:
                (encoding,) = self._tokenizer.encode_batch([row if len(row) > 1 else row[0]])
            else:
                encoding = self._tokenizer.encode(*row)
            yield row, encoding

    def given(self, rows: Sequence[Sequence[int]], subject: str) -> list[Tokens]:
        """Return texts that are ids already, special ones included; raise an InvalidRequest for wrong ids.

        ``subject`` names the ids in errors.
        """
        most, size = self.config.max_length, self.vocabulary_size
        for row in rows:
            if not 1 <= len(row) <= most:
                given, expected = Raw(f"{len(row)} ids"), f"1 to {most}"
                raise InvalidRequest(subject, given=given, expected=expected, fix="Shorten it, or send text.")
            if wrong := next((token for token in row if not 0 <= token < size), None):
                fix = "Use the model's own tokenizer, or send text."
                raise InvalidRequest(f"an id of {subject}", given=wrong, expected=f"0 to {size - 1}", fix=fix)
        return [_tokens(row, [0] * len(row), []) for row in rows]

    def padded(self, rows: Sequence[Tokens]) -> dict[str, Array]:
        """Return the outputs for rows of tokens, each as long as the longest of them."""
        config = self.config
        ids = np.full((len(rows), max(len(row.ids) for row in rows)), config.pad_id, np.int64)
        mask, segments = np.zeros_like(ids), np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = row.ids
            mask[number, : len(row.ids)] = 1
            segments[number, : len(row.ids)] = row.segments
        computed: dict[str, Array] = {config.ids: ids, config.mask: mask}
        if config.segments:
            computed[config.segments] = segments
        if config.offsets:
            computed[config.offsets] = offsets = np.zeros((*ids.shape, 2), np.int64)
            for number, row in enumerate(rows):
                offsets[number, : len(row.offsets)] = row.offsets
        return computed

    def _check_length(self, tokens: int) -> None:
        most, fix = self.config.max_length, "Shorten the text." if tokens else "Send some text."
        if not 1 <= tokens <= most:
            given = Raw(f"{tokens} tokens")
            subject = f"text in input {self.config.input!r}"
            raise InvalidRequest(subject, given=given, expected=f"1 to {most}", fix=fix)

    def check_bytes(self, name: str, longest: int) -> None:
        """Raise an InvalidRequest if the longest text of an input has too many bytes."""
        limit = self.config.max_text_bytes
        if longest > limit:
            given, expected = Raw(f"{longest} bytes"), f"at most {limit}"
            raise InvalidRequest(f"text in input {name!r}", given=given, expected=expected, fix="Shorten the text.")

    def _decoded(self, name: str, column: Array) -> list[str]:
        encoded = column.tolist()
        self.check_bytes(name, max(map(len, encoded)))
        return text.decode_all(encoded, f"input {name!r}")


def _tokens(ids: Sequence[int], segments: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Tokens:
    # A list of Python's numbers takes four times as much memory as an array of 64 bits.
    return Tokens(np.array(ids, np.int64), np.array(segments, np.int64), np.array(offsets, np.int64).reshape(-1, 2))


#: The type of a manifest's ``preprocess`` to the function that returns its implementation for a bundle.
STEPS: Final[Mapping[type[Preprocess], Callable[[Any, Bundle], Preprocessor]]] = {
    ExpressionPreprocess: lambda config, bundle: ExpressionPreprocessor(
        config, lambda texts, largest: (expression.tokenize(texts, largest),), expression.PLUS
    ),
    ArithmeticPreprocess: lambda config, bundle: ExpressionPreprocessor(
        config, arithmetic.tokenize, arithmetic.KINDS - 1
    ),
    TokenizerPreprocess: lambda config, bundle: TokenizerPreprocessor(
        config,
        bundle.read(config.file),
        f"file {bundle.path / config.file}",
        cut=not isinstance(bundle.manifest.program, GenerateProgram),
    ),
    ImagePreprocess: lambda config, bundle: ImagePreprocessor(config),
}


def preprocessor(bundle: Bundle) -> Preprocessor | None:
    """Return the preprocessor of a bundle, if any; raise a BundleError unless it reproduces the golden inputs."""
    config = bundle.manifest.preprocess
    if config is None:
        return None
    step = STEPS[type(config)](config, bundle)
    subject, field = f"bundle {bundle.path}", f"golden raw {', '.join(repr(spec.name) for spec in step.inputs)}"
    texts = [bundle.golden.raw[spec.name] for spec in step.inputs]
    for spec, raw in zip(step.inputs, texts, strict=True):
        holds, given = raw.dtype.kind == "S" and spec.accepts(raw.shape), Raw(f"{raw.dtype} {list(raw.shape)}")
        require(holds, subject, field, given, f"bytes {list(spec.shape)}")
    try:
        computed = step(*texts)
    except InvalidRequest as error:
        subject = f"{subject} {field}"
        raise BundleError(
            subject, given=Raw(error), expected="what the preprocess step takes", fix=EXPORT_AGAIN
        ) from None
    for name, array in computed.items():
        near = f"within {step.tolerance:.2g} of" if step.tolerance else "exactly"
        expected = f"{near} the golden input {name!r} after preprocessing"
        golden = bundle.golden.inputs[name]
        holds = array.shape == golden.shape and np.allclose(array, golden, rtol=0, atol=step.tolerance)
        require(holds, subject, field, Raw("other values"), expected)
    return step


class Postprocessor(NamedTuple):
    """Computes one further output of the model, such as a label."""

    output: TensorSpec
    reads: str  # the output of the graph, [N, columns] or [N, tokens, columns], that ``compute`` takes
    compute: Callable[[Array], Array]  # returns [N, 1] or [N, tokens], of probabilities [N, columns]


def postprocessors(manifest: Manifest) -> tuple[Postprocessor, ...]:
    """Return the postprocessors that a manifest describes: none, that of a score, or of a label and probabilities.

    A graph's own output of the name ``probabilities`` stays as it is. Spans and boxes are not computed of logits alone.
    """
    config = manifest.postprocess
    if config is None or isinstance(config, SpanPostprocess | BoxPostprocess):
        return ()
    answer = Postprocessor(config.result, config.logits, config.answer())
    outputs = (config.output, *(spec.name for spec in manifest.outputs))
    if not isinstance(config, LabelPostprocess) or PROBABILITIES in outputs:
        return (answer,)
    spec = TensorSpec(PROBABILITIES, "FP32", config.shape)
    return (answer, Postprocessor(spec, config.logits, softmax))


def made_outputs(manifest: Manifest) -> tuple[TensorSpec, ...]:
    """Return the outputs that are made of those of the graph."""
    if isinstance(manifest.postprocess, SpanPostprocess | BoxPostprocess):
        return manifest.postprocess.results
    return tuple(made.output for made in postprocessors(manifest))


def softmax(logits: Array) -> Array:
    """Return the probabilities of classes, [N, classes], for their logits; NaN for those of a row with an infinity."""
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Array = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def load_tokenizer(definition: bytes, subject: str) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``, without padding or truncation; raise as
    :class:`TokenizerPreprocessor`.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        fix = "Install the extra 'text'."
        raise BackendError("tokenizers", given=Raw(error), expected="an importable package", fix=fix) from None
    try:
        tokenizer = Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library raises nothing more specific
        expected = "a tokenizer.json of Hugging Face's tokenizers"
        raise BundleError(subject, given=Raw(error), expected=expected, fix="Export the bundle again.") from None
    # It may have those of its training.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
