"""Arithmetic text with ``+``, ``-``, ``*`` and parentheses to the tokens of calculators that read token by token.

An expression is a number, which may have a sign directly before it; two expressions joined by an operator; or an
expression in parentheses, which may have a ``-`` directly before them. Multiplication comes before addition. Each
number, operator and parenthesis is one token; the ``-`` before ``(`` becomes the two tokens ``-1 *``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Final, TypeVar

import numpy as np

from edge.bundles.expression import NUMBER, check_operands, invalid
from edge.datatypes import Array

MAX_TOKENS: Final = 64
#: How deep parentheses may be nested.
MAX_DEPTH: Final = 7
#: Below FP32's largest number by what a network may multiply its state with.
MAX_MAGNITUDE: Final = 1e30

PADDING, NUMBER_KIND, PLUS, MINUS, TIMES, OPEN, CLOSE = range(7)
KINDS: Final = 7

_MAX_CHARS = 1024
_OPERATORS = {"+": PLUS, "-": MINUS, "*": TIMES}
_SPACES = re.compile(r"\s*", re.ASCII)
_FIX = "Write numbers joined by +, - or *, with parentheses where needed, for example '2 * (3 - -4.5)'."
_SHORTER = "Split it into shorter expressions."

_Value = TypeVar("_Value", float, Fraction)


def parse(text: str, max_abs_operand: float = float("inf")) -> tuple[list[int], list[Decimal]]:
    """Split an expression into the kinds of its tokens and their values, which are 0 unless the token is a number.

    Raise an InvalidRequest, with the place counted from 1, unless it is an expression of at most 64 tokens and 7 levels
    of parentheses, with no operand above ``max_abs_operand`` and no value that FP32 could not hold.
    """
    if len(text) > _MAX_CHARS:
        raise invalid(text, f"at most {_MAX_CHARS} characters", _SHORTER)
    kinds: list[int] = []
    values: list[Decimal] = []
    opened: list[int] = []  # the places of the parentheses that are open, from 1
    wants_operand = True
    position = _after_spaces(text, 0)
    while position < len(text):
        place, read = position + 1, text[position]
        made: tuple[tuple[int, Decimal | int], ...]
        if wants_operand and (match := NUMBER.match(text, position)):
            made, wants_operand = ((NUMBER_KIND, Decimal(match[0])),), False
            position = match.end()
        elif wants_operand and text.startswith(("(", "-("), position):
            made = ((OPEN, 0),) if read == "(" else ((NUMBER_KIND, -1), (TIMES, 0), (OPEN, 0))
            position += 1 if read == "(" else 2
            opened.append(position)
            if len(opened) > MAX_DEPTH:
                raise invalid(text, f"at most {MAX_DEPTH} open parentheses at character {position}", _SHORTER)
        elif wants_operand:
            raise invalid(text, f"an operand at character {place}", _FIX)
        elif read in _OPERATORS:
            made, wants_operand = ((_OPERATORS[read], 0),), True
            position += 1
        elif read == ")" and opened:
            made = ((CLOSE, 0),)
            opened.pop()
            position += 1
        else:
            expected = "+, - or *, since no ( is open," if read == ")" else "+, -, * or )"
            raise invalid(text, f"{expected} at character {place}", _FIX)
        kinds += [kind for kind, _ in made]
        values += [Decimal(value) for _, value in made]
        if len(kinds) > MAX_TOKENS:
            expected = f"at most {MAX_TOKENS} numbers, operators and parentheses, and character {place} is the next"
            raise invalid(text, expected, _SHORTER)
        position = _after_spaces(text, position)
    if wants_operand:
        raise invalid(text, "an operand at the end", _FIX)
    if opened:
        raise invalid(text, f"a ) at the end for the ( at character {opened[-1]}", _FIX)
    check_operands(text, [float(value) for value in values], max_abs_operand)
    # Numbers count as 1 or more: FP32 must also hold the product of two large numbers before it multiplies them by 0.
    bound = _value([PLUS if kind == MINUS else kind for kind in kinds], [max(1.0, abs(float(each))) for each in values])
    if not bound <= MAX_MAGNITUDE:  # also of more digits than a float holds, which gives NaN
        raise invalid(text, f"a value below {MAX_MAGNITUDE:g} with all signs dropped", "Use smaller operands.")
    return kinds, values


def tokenize(texts: Sequence[str], max_abs_operand: float = float("inf")) -> tuple[Array, Array]:
    """Return the kinds, int64, and values, float32, of the tokens of expressions, both of shape (len(texts), 64).

    Kind 0 and value 0 fill each row. Raise as :func:`parse`.
    """
    kinds = np.full((len(texts), MAX_TOKENS), PADDING, np.int64)
    values = np.zeros((len(texts), MAX_TOKENS), np.float32)
    for row, text in enumerate(texts):
        parsed_kinds, parsed_values = parse(text, max_abs_operand)
        kinds[row, : len(parsed_kinds)] = parsed_kinds
        values[row, : len(parsed_values)] = parsed_values
    return kinds, values


def evaluate(text: str) -> float:
    """Return the true value of an expression, rounded once at the end; raise as :func:`parse`."""
    kinds, values = parse(text)
    return float(_value(kinds, [Fraction(value) for value in values]))


def _value(kinds: Sequence[int], values: Sequence[_Value]) -> _Value:
    zero, one = values[0] * 0, values[0] * 0 + 1
    outer: list[tuple[_Value, _Value]] = []
    total, term = zero, one
    for kind, value in zip(kinds, values, strict=True):
        if kind == NUMBER_KIND:
            term = term * value
        elif kind in (PLUS, MINUS):
            total, term = total + term, one if kind == PLUS else -one
        elif kind == OPEN:
            outer.append((total, term))
            total, term = zero, one
        elif kind == CLOSE:
            inner = total + term
            total, term = outer.pop()
            term = term * inner
    return total + term


def _after_spaces(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    return match.end() if match else position
