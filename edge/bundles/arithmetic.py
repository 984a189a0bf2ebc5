"""The tokenizer of arithmetic text with ``+``, ``-``, ``*`` and parentheses.

An expression is a number, which may have a sign directly before it; two expressions joined by an operator; or an
expression in parentheses, which may have a ``-`` directly before them. Multiplication comes before addition. Each
number, operator and parenthesis is one token; the ``-`` before ``(`` becomes the two tokens ``-1 *``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Final, TypeVar

import numpy as np

from edge.bundles.expression import NUMBER, check_operands, in_row, invalid, invalid_at
from edge.datatypes import Array
from edge.errors import InvalidRequest

MAX_TOKENS: Final = 64
#: How deep parentheses may be nested.
MAX_DEPTH: Final = 7
#: The largest value of an expression with all signs dropped. FP32 holds more, but a network's state may be a
#: multiple of the value.
MAX_MAGNITUDE: Final = 1e30

#: The kinds of tokens.
PADDING, OPERAND, PLUS, MINUS, TIMES, OPEN, CLOSE = range(7)
KINDS: Final = 7

_MAX_CHARS = 1024
_OPERATORS = {"+": PLUS, "-": MINUS, "*": TIMES}
_SPACES = re.compile(r"\s*", re.ASCII)
_ZERO, _MINUS_ONE = Decimal(0), Decimal(-1)
_FIX = "Write numbers joined by +, - or *, with parentheses where needed, for example '2 * (3 - -4.5)'."
_SHORTER = "Split it into shorter expressions."

#: A token: its kind, its value (0 unless it is a number) and the character, from 1, where it ends.
_Token = tuple[int, Decimal, int]
_Number = TypeVar("_Number", float, Fraction)


def parse(text: str, max_abs_operand: float = float("inf")) -> tuple[list[int], list[Decimal]]:
    """Split an expression into the kinds of its tokens and their values, which are 0 unless the token is a number.

    Raise an InvalidRequest, with the place counted from 1, unless it is an expression of at most 64 tokens and 7 levels
    of parentheses, with no operand above ``max_abs_operand`` and no value that FP32 could not hold.
    """
    if len(text) > _MAX_CHARS:
        raise invalid(text, f"at most {_MAX_CHARS} characters", _SHORTER)
    kinds: list[int] = []
    values: list[Decimal] = []
    opened: list[int] = []  # the places of the parentheses that are open
    for kind, value, end in _tokens(text):
        if kind == OPEN:
            opened.append(end)
            if len(opened) > MAX_DEPTH:
                raise invalid(text, f"at most {MAX_DEPTH} open parentheses at character {end}", _SHORTER)
        elif kind == CLOSE:
            if not opened:
                raise invalid(text, f"no ) at character {end}, because no ( is open", _FIX)
            opened.pop()
        if len(kinds) == MAX_TOKENS:
            raise invalid(text, f"at most {MAX_TOKENS} tokens, and the next ends at character {end}", _SHORTER)
        kinds.append(kind)
        values.append(value)
    if opened:
        raise invalid(text, f"a ) at the end for the ( at character {opened[-1]}", _FIX)
    check_operands(text, [float(value) for value in values], max_abs_operand)
    # Numbers count as 1 or more: a network may multiply two large numbers before it multiplies their product by 0.
    bound = _value([PLUS if kind == MINUS else kind for kind in kinds], [max(1.0, abs(float(each))) for each in values])
    if not bound <= MAX_MAGNITUDE:  # NaN, too, if a float cannot hold an operand
        raise invalid(text, f"a value of at most {MAX_MAGNITUDE:g} with all signs dropped", "Write smaller operands.")
    return kinds, values


def tokenize(texts: Sequence[str], max_abs_operand: float = float("inf")) -> tuple[Array, Array]:
    """Return the kinds, int64, and values, float32, of the tokens of expressions, both of shape (len(texts), 64).

    Kind 0 and value 0 fill each row. Raise as :func:`parse`.
    """
    kinds = np.full((len(texts), MAX_TOKENS), PADDING, np.int64)
    values = np.zeros((len(texts), MAX_TOKENS), np.float32)
    for row, text in enumerate(texts):
        try:
            parsed_kinds, parsed_values = parse(text, max_abs_operand)
        except InvalidRequest as error:
            raise in_row(error, row, len(texts)) from None
        kinds[row, : len(parsed_kinds)] = parsed_kinds
        values[row, : len(parsed_values)] = parsed_values
    return kinds, values


def evaluate(text: str) -> float:
    """Return the true value of an expression, rounded once at the end; raise as :func:`parse`."""
    kinds, values = parse(text)
    return float(_value(kinds, [Fraction(value) for value in values]))


def _tokens(text: str) -> Iterator[_Token]:
    """Yield tokens; raise an InvalidRequest where an operand, or an operator or ``)`` after one, is missing."""
    position, wants_operand = _after_spaces(text, 0), True
    while position < len(text):
        read = text[position]
        end = position + 1
        if wants_operand:
            if match := NUMBER.match(text, position):
                end, wants_operand = match.end(), False
                yield OPERAND, Decimal(match[0]), end
            elif text.startswith(("(", "-("), position):
                if read == "-":
                    yield OPERAND, _MINUS_ONE, end
                    yield TIMES, _ZERO, end
                    end += 1
                yield OPEN, _ZERO, end
            else:
                raise invalid_at(text, position, "an operand", _FIX)
        elif read in _OPERATORS:
            wants_operand = True
            yield _OPERATORS[read], _ZERO, end
        elif read == ")":
            yield CLOSE, _ZERO, end
        else:
            raise invalid_at(text, position, "+, -, * or )", _FIX)
        position = _after_spaces(text, end)
    if wants_operand:
        raise invalid_at(text, position, "an operand", _FIX)


def _value(kinds: Sequence[int], values: Sequence[_Number]) -> _Number:
    """Return the value of tokens, in the arithmetic of their values."""
    zero = values[0] * 0
    total, term = zero, zero + 1
    outer: list[tuple[_Number, _Number]] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind == OPERAND:
            term = term * value
        elif kind in (PLUS, MINUS):
            total, term = total + term, zero + (1 if kind == PLUS else -1)
        elif kind == OPEN:
            outer.append((total, term))
            total, term = zero, zero + 1
        elif kind == CLOSE:
            inner = total + term
            total, term = outer.pop()
            term = term * inner
    return total + term


def _after_spaces(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    return match.end() if match else position
