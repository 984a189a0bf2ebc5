"""Random arithmetic expressions with a given number of operands and depth of parentheses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Draws the text of an operand.
Operand = Callable[[np.random.Generator], str]

_SECOND_GROUP = 0.3
_NEGATED_GROUP = 0.15


def whole(low: int, high: int) -> Operand:
    """Return a function that draws whole numbers from ``low`` to ``high``, both included."""
    return lambda random: str(random.integers(low, high + 1))


def decimal(low: int, high: int, digits: int) -> Operand:
    """Return a function that draws numbers from ``low`` to ``high`` with ``digits`` decimal digits."""
    scale = 10**digits
    return lambda random: f"{random.integers(low * scale, high * scale + 1) / scale:.{digits}f}"


def mixed(first: Operand, second: Operand, share: float) -> Operand:
    """Return a function that draws from ``second`` with probability ``share``, else from ``first``."""
    return lambda random: (second if random.random() < share else first)(random)


def draw(random: np.random.Generator, operands: int, depth: int, operand: Operand, operators: str = "+-*") -> str:
    """Return an expression with this number of operands whose parentheses are nested exactly ``depth`` deep."""

    def flat(count: int) -> list[str]:
        return [operand(random) for _ in range(count)]

    def group(count: int, depth: int) -> str:
        sign = "-" if random.random() < _NEGATED_GROUP else ""
        return f"{sign}({expression(count, depth)})"

    def expression(count: int, depth: int) -> str:
        if depth == 0:
            return _join(random, flat(count), operators)
        inside = int(random.integers(min(2, count), count + 1))
        items = flat(count - inside)
        if len(items) >= 2 and random.random() < _SECOND_GROUP:
            items = [*items[2:], group(2, int(random.integers(depth)))]
        items.insert(int(random.integers(len(items) + 1)), group(inside, depth - 1))
        return _join(random, items, operators)

    return expression(operands, depth)


def _join(random: np.random.Generator, items: list[str], operators: str) -> str:
    first, *rest = items
    return " ".join([first, *(f"{random.choice(list(operators))} {item}" for item in rest)])
