"""Preprocessing on the device, as a bundle's manifest asks for it, so that clients may send text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from edge import expression, text
from edge.bundle import Bundle
from edge.datatypes import Array, TensorSpec
from edge.errors import BackendError, BundleError, InvalidRequest, Literally
from edge.manifest import ExpressionPreprocess, TokenizerPreprocess

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Preprocessor(Protocol):
    """Text to the inputs of a graph."""

    @property
    def input(self) -> TensorSpec:
        """What a client may send."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that it stands for; a client sends these or :attr:`input`, never both."""
        ...

    def __call__(self, texts: Array) -> dict[str, Array]:
        """Return the inputs of the graph for text of shape (rows, 1).

        Raises:
            InvalidRequest: a text is not UTF-8, or not what the model reads.
        """
        ...


class ExpressionPreprocessor:
    """Arithmetic text (BYTES, [-1, 1]) to the calculator's tokens (FP32, [-1, 15]); see :class:`Preprocessor`."""

    def __init__(self, config: ExpressionPreprocess) -> None:
        self.input = TensorSpec(config.input, "BYTES", (-1, 1))
        self.outputs = config.outputs
        self._max_abs_operand = config.max_abs_operand

    def __call__(self, texts: Array) -> dict[str, Array]:
        """Return the tokens of expressions."""
        decoded = text.decode(texts[:, 0], f"input {self.input.name!r}").tolist()
        return {self.outputs[0]: expression.tokenize(decoded, self._max_abs_operand)}


class TokenizerPreprocessor:
    """Text (BYTES, [-1, 1]) to token ids and mask (INT64, [-1, tokens]); see :class:`Preprocessor`.

    Args:
        config: what the manifest says.
        definition: the ``tokenizer.json``.
        subject: how errors call that file.

    Raises:
        BundleError: the file is no tokenizer.
        BackendError: the package ``tokenizers`` is missing.
    """

    def __init__(self, config: TokenizerPreprocess, definition: bytes, subject: str) -> None:
        self.input = TensorSpec(config.input, "BYTES", (-1, 1))
        self.outputs = config.outputs
        self._config = config
        self._tokenizer = _tokenizer(definition, subject)
        # A tokenizer.json brings the padding and truncation of its training with it; the manifest's hold here.
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(config.max_length)

    def __call__(self, texts: Array) -> dict[str, Array]:
        """Return ids and mask, as long as the longest text of the request."""
        limit = self._config.max_text_bytes
        for element in texts[:, 0].tolist():
            if len(element) > limit:
                given = Literally(f"{len(element)} bytes")
                subject = f"text in input {self.input.name!r}"
                raise InvalidRequest(subject, given=given, expected=f"at most {limit}", fix="Send less of it.")
        decoded = text.decode(texts[:, 0], f"input {self.input.name!r}").tolist()
        # One by one: the batch call would start threads of its own beside the server's.
        encoded = [self._tokenizer.encode(one).ids for one in decoded]
        ids = np.full((len(encoded), max(map(len, encoded))), self._config.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return {self._config.ids: ids, self._config.mask: mask}


def preprocessor(bundle: Bundle) -> Preprocessor | None:
    """Return the preprocessor that a bundle asks for, if it asks for one.

    Raises:
        BundleError: a file of it is broken.
        BackendError: a package that it needs is missing.
    """
    config = bundle.manifest.preprocess
    if config is None:
        return None
    if isinstance(config, ExpressionPreprocess):
        return ExpressionPreprocessor(config)
    return TokenizerPreprocessor(config, bundle.read(config.file), f"file {bundle.path / config.file}")


def _tokenizer(definition: bytes, subject: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        fix = "Install the extra 'text'."
        raise BackendError("tokenizers", given=Literally(error), expected="an importable package", fix=fix) from None
    try:
        return Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library raises nothing more specific
        expected = "a tokenizer.json of Hugging Face's tokenizers"
        raise BundleError(subject, given=Literally(error), expected=expected, fix="Export the bundle again.") from None
