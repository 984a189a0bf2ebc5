"""The calculator's tokenizer: arithmetic text to 15 floats, as paper 000 and its public data define it.

Slot ``2k`` holds operand ``k``, slot ``2k - 1`` the operator before it (1.0 for ``+``, 0.0 for ``-``), and 0.5 fills
the rest. Training and serving share this implementation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array
from edge.errors import InvalidRequest

MAX_TERMS = 8
TOKENS = 2 * MAX_TERMS - 1
PADDING = 0.5
PLUS, MINUS = 1.0, 0.0

_MAX_CHARS = 256
#: A number with an optional sign directly before it.
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
_OPERAND = re.compile(rf"\s*({NUMBER.pattern})\s*", re.ASCII)
_FIX = "Write operands joined by + or -, for example '3 - -4 + 2'."


def parse(text: str, max_abs_operand: float = float("inf")) -> tuple[list[float], list[float]]:
    """Split an expression such as ``"3 - -4 + 2"`` into its n operands and its n - 1 operator codes.

    Raise an InvalidRequest unless it is 1 to 8 operands joined by ``+`` or ``-``, none above ``max_abs_operand``.
    """
    if len(text) > _MAX_CHARS:
        raise invalid(text, f"at most {_MAX_CHARS} characters")
    operands: list[float] = []
    operators: list[float] = []
    position = 0
    while match := _OPERAND.match(text, position):
        operands.append(float(match[1]))
        position = match.end()
        if position == len(text) or text[position] not in "+-":
            break
        operators.append(PLUS if text[position] == "+" else MINUS)
        position += 1
    is_complete = len(operands) == len(operators) + 1
    if position < len(text) or not is_complete:
        where = f"at character {position + 1}" if position < len(text) else "at the end"
        raise invalid(text, f"{'+ or -' if is_complete else 'an operand'} {where}")
    if len(operands) > MAX_TERMS:
        expected = f"at most {MAX_TERMS} operands, and it has {len(operands)}"
        raise invalid(text, expected, "Split it into shorter expressions.")
    check_operands(text, operands, max_abs_operand)
    return operands, operators


def check_operands(text: str, operands: Sequence[float], max_abs_operand: float) -> None:
    """Raise an InvalidRequest about ``text`` if one of its operands is above ``max_abs_operand``."""
    largest = max(operands, key=abs)
    if abs(largest) > max_abs_operand:
        fix = f"Replace the operand {largest:g}; the model was made for smaller ones."
        raise invalid(text, f"operands between {-max_abs_operand:g} and {max_abs_operand:g}", fix)


def invalid(text: str, expected: str, fix: str = _FIX) -> InvalidRequest:
    """Return the error about an expression."""
    return InvalidRequest("expression", given=text, expected=expected, fix=fix)


def tokenize(texts: Sequence[str], max_abs_operand: float = float("inf")) -> Array:
    """Return the model's input for expressions, float32 of shape (len(texts), 15); raise as :func:`parse`."""
    tokens = np.full((len(texts), TOKENS), PADDING, dtype=np.float32)
    for row, text in zip(tokens, texts, strict=True):
        operands, operators = parse(text, max_abs_operand)
        row[0 : 2 * len(operands) : 2] = operands
        row[1 : 2 * len(operators) : 2] = operators
    return tokens


def evaluate(text: str) -> float:
    """Return the true value of an expression; raise as :func:`parse`."""
    operands, operators = parse(text)
    signs = [1.0] + [1.0 if operator == PLUS else -1.0 for operator in operators]
    return sum(sign * operand for sign, operand in zip(signs, operands, strict=True))
