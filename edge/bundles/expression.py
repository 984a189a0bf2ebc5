"""The calculator's tokenizer: arithmetic text to 15 floats, as paper 000 and its public data define it.

Slot ``2k`` holds operand ``k``, slot ``2k - 1`` the operator before it (1.0 for ``+``, 0.0 for ``-``), and 0.5 fills
the rest. Training and serving share this implementation.
"""

from __future__ import annotations

import re
import unicodedata
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
_DIGITS = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_FIX = "Write operands joined by + or -, for example '3 - -4 + 2'."


def parse(text: str, max_abs_operand: float = float("inf")) -> tuple[list[float], list[float]]:
    """Split an expression such as ``"3 - -4 + 2"`` into its n operands and its n - 1 operator codes.

    Raise an InvalidRequest, with the place counted from 1, unless it is 1 to 8 operands joined by ``+`` or ``-``, none
    above ``max_abs_operand``.
    """
    if len(text) > _MAX_CHARS:
        raise invalid(text, f"at most {_MAX_CHARS} characters")
    operands: list[float] = []
    operators: list[float] = []
    position = 0
    while match := _OPERAND.match(text, position):
        if len(operands) == MAX_TERMS:
            expected = f"at most {MAX_TERMS} operands, and the next is at character {match.start(1) + 1}"
            raise invalid(text, expected, "Split it into shorter expressions.")
        operands.append(float(match[1]))
        position = match.end()
        if position == len(text) or text[position] not in "+-":
            break
        operators.append(PLUS if text[position] == "+" else MINUS)
        position += 1
    is_complete = len(operands) == len(operators) + 1
    if position < len(text) or not is_complete:
        expected = "+ or -" if is_complete else "an operand"
        blank = len(text) - len(text[position:].lstrip(" \t\n\r\f\v"))
        raise invalid_at(text, blank, expected, _FIX)
    check_operands(text, operands, max_abs_operand)
    return operands, operators


def check_operands(text: str, operands: Sequence[float], max_abs_operand: float) -> None:
    """Raise an InvalidRequest if one of the operands of an otherwise valid expression is above ``max_abs_operand``."""
    if max(map(abs, operands)) <= max_abs_operand:
        return
    number = next(number for number in _DIGITS.finditer(text) if float(number[0]) > max_abs_operand)
    fix = f"Replace {float(number[0]):g} at character {number.start() + 1}; the model was made for smaller operands."
    raise invalid(text, f"operands between {-max_abs_operand:g} and {max_abs_operand:g}", fix)


def invalid_at(text: str, position: int, expected: str, fix: str) -> InvalidRequest:
    """Return the error about the character at ``position``, from 0, of an expression, or about its end.

    Characters that stand for one of ASCII, such as U+2212 for ``-``, get a fix of their own.
    """
    if position >= len(text):
        return invalid(text, f"{expected} at the end", fix)
    if ascii_char := _ascii(text[position]):
        fix = f"Write {ascii_char!r} instead of {text[position]!r} (U+{ord(text[position]):04X})."
    return invalid(text, f"{expected} at character {position + 1}", fix)


def _ascii(char: str) -> str:
    """Return the ASCII character that another one stands for; empty if it is ASCII or stands for none."""
    if char.isascii():
        return ""
    if char.isspace():
        return " "
    if char == "\N{MINUS SIGN}" or unicodedata.category(char) == "Pd":  # a dash
        return "-"
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    meant = unicodedata.normalize("NFKC", char) if unicodedata.east_asian_width(char) == "F" else ""  # full width
    return meant if meant in tuple("+*()") else ""


def invalid(text: str, expected: str, fix: str = _FIX) -> InvalidRequest:
    """Return the error about an expression."""
    return InvalidRequest("expression", given=text, expected=expected, fix=fix)


def in_row(error: InvalidRequest, row: int, rows: int) -> InvalidRequest:
    """Return the error with the row, from 0, in its subject, counted from 1, if there are several rows."""
    subject = f"{error.subject} in row {row + 1}" if rows > 1 else error.subject
    return InvalidRequest(subject, given=error.given, expected=error.expected, fix=error.fix)


def tokenize(texts: Sequence[str], max_abs_operand: float = float("inf")) -> Array:
    """Return the model's input for expressions, float32 of shape (len(texts), 15); raise as :func:`parse`."""
    tokens = np.full((len(texts), TOKENS), PADDING, dtype=np.float32)
    for row, text in enumerate(texts):
        try:
            operands, operators = parse(text, max_abs_operand)
        except InvalidRequest as error:
            raise in_row(error, row, len(texts)) from None
        tokens[row, 0 : 2 * len(operands) : 2] = operands
        tokens[row, 1 : 2 * len(operators) : 2] = operators
    return tokens


def evaluate(text: str) -> float:
    """Return the true value of an expression; raise as :func:`parse`."""
    operands, operators = parse(text)
    signs = [1.0] + [1.0 if operator == PLUS else -1.0 for operator in operators]
    return sum(sign * operand for sign, operand in zip(signs, operands, strict=True))
