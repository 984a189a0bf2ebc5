"""Preprocessing on the device, as a bundle's manifest asks for it, so that clients may send text."""

from __future__ import annotations

from edge import expression, text
from edge.datatypes import Array, TensorSpec
from edge.manifest import ExpressionPreprocess, Manifest


class ExpressionPreprocessor:
    """Arithmetic text (BYTES, [-1, 1]) to the calculator's tokens (FP32, [-1, 15]).

    Attributes:
        input: what a client may send.
        outputs: the inputs of the graph that it stands for; a client sends these or :attr:`input`, never both.
    """

    def __init__(self, config: ExpressionPreprocess) -> None:
        self.input = TensorSpec(config.input, "BYTES", (-1, 1))
        self.outputs = (config.output,)
        self._max_abs_operand = config.max_abs_operand

    def __call__(self, texts: Array) -> dict[str, Array]:
        """Return the inputs of the graph for text of shape (rows, 1).

        Raises:
            InvalidRequest: a text is not UTF-8 or not an expression.
        """
        decoded = text.decode(texts[:, 0], f"input {self.input.name!r}").tolist()
        return {self.outputs[0]: expression.tokenize(decoded, self._max_abs_operand)}


def preprocessor(manifest: Manifest) -> ExpressionPreprocessor | None:
    """Return the preprocessor that a manifest asks for, if it asks for one."""
    return ExpressionPreprocessor(manifest.preprocess) if manifest.preprocess else None
