"""What a calculator attends to in one expression."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from edge.bundles.expression import MAX_TERMS, TOKENS, parse, tokenize
from export.models.attention import MultiHeadAttention
from export.papers.calculator.networks import AttentiveRecurrent, Gate, Regressor, Transformer

#: The token before the expression, from which a transformer reads the value.
SUMMARY = "Σ"
PADDING = "·"


class Attention(msgspec.Struct, frozen=True):
    """Weights of attention.

    Attributes:
        keys: what is attended to: tokens, or terms, with :data:`PADDING` for each unused one.
        kind: ``softmax``, whose weights sum to 1, or ``gate``, whose weights have a sign, which
            the network may invert again when it reads operands.
        layers: the weights of each layer, [heads, queries, keys]. Of several queries each is the token of its place in
            ``keys``; a single one is the summary.
    """

    keys: tuple[str, ...]
    kind: str
    layers: tuple[list[list[list[float]]], ...]


def attention_of(model: Regressor, expression: str) -> Attention | None:
    """Return what a network attends to in an expression; None for one without attention.

    Raises:
        InvalidRequest: it is no expression.
    """
    x = torch.from_numpy(tokenize([expression]))
    model.eval()
    with torch.no_grad():
        if isinstance(model, (AttentiveRecurrent, Gate)):
            weights = model.attended(x)[1][:, None, :]  # [1, 1, keys]
            kind = "gate" if isinstance(model, Gate) and model.score is None else "softmax"
            keys = terms_of(expression) if isinstance(model, Gate) else tokens_of(expression)
            return Attention(keys, kind, (_rounded(weights),))
        if isinstance(model, Transformer):
            layers = [_rounded(layer[0]) for layer in transformer_weights(model, x)]
            return Attention((SUMMARY, *tokens_of(expression)), "softmax", tuple(layers))
    return None


def transformer_weights(model: Transformer, x: Tensor) -> list[Tensor]:
    """Return the weights of each layer, [N, H, queries, 16], for tokens [N, 15]. Hooks read them beside a usual run."""
    found: list[Tensor] = []

    def read(
        module: nn.Module, inputs: tuple[Tensor], options: dict[str, int | None], outputs: tuple[Tensor, ...]
    ) -> None:
        assert isinstance(module, MultiHeadAttention)
        found.append(module.weights(inputs[0], outputs[1])[:, :, : options["queries"]])

    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    hooks = [attention.register_forward_hook(read, with_kwargs=True) for attention in attentions]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def tokens_of(expression: str) -> tuple[str, ...]:
    """Return the 15 tokens of an expression as text: operands and operators in turn, and padding."""
    operands, operators = _texts(expression)
    tokens = [operands[0]]
    for operator, operand in zip(operators, operands[1:], strict=True):
        tokens += [operator, operand]
    return _padded(tokens, TOKENS)


def terms_of(expression: str) -> tuple[str, ...]:
    """Return the 8 terms of an expression as text: each operator with its operand, and padding."""
    operands, operators = _texts(expression)
    terms = [operands[0], *(f"{operator} {operand}" for operator, operand in zip(operators, operands[1:], strict=True))]
    return _padded(terms, MAX_TERMS)


def _texts(expression: str) -> tuple[list[str], list[str]]:
    operands, operators = parse(expression)
    return [f"{operand:g}" for operand in operands], ["+" if operator else "-" for operator in operators]


def _padded(texts: list[str], count: int) -> tuple[str, ...]:
    return (*texts, *[PADDING] * (count - len(texts)))


def _rounded(weights: Tensor) -> list[list[list[float]]]:
    rounded: list[list[list[float]]] = (weights.double() * 1e5).round().div(1e5).tolist()
    return rounded
