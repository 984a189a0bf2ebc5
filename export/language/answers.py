"""Answers in texts: where they are, what number they are, and whether two are equal."""

from __future__ import annotations

import re
from fractions import Fraction

#: Stands before the answer, once in each text, as in GSM8K.
MARK = "####"
#: Longer texts are not read as numbers; their digits would take seconds.
_MAX_CHARS = 64
_SIGN = r"(\$?[+-]?|[+-]\$)"
_THOUSANDS = re.compile(rf"{_SIGN}\d{{1,3}}(,\d{{3}})+(\.\d*)?%?", re.ASCII)
_NUMBER = re.compile(rf"{_SIGN} *(?:(\d+) +(?=\d+/))?(\d+(?:\.\d*)?|\.\d+)(?:/(\d+(?:\.\d*)?))?%?", re.ASCII)
#: What LaTeX and typography write in numbers, and the same in plain characters.
_PLAIN = {"\N{MINUS SIGN}": "-", "\\$": "$", "\\%": "%", "{,}": ",", "\\!": ""}
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", re.ASCII)


def parse_answer(text: str) -> str | None:
    """Return what follows the first :data:`MARK` on its line, normalised; None without a mark or anything after it."""
    _, mark, rest = text.partition(MARK)
    line = rest.partition("\n")[0].partition(MARK)[0]
    return normalised(line) or None if mark else None


def normalised(answer: str) -> str:
    """Return an answer with single spaces, and a number without thousands separators: ``1,234`` becomes ``1234``.

    Lists and pairs such as ``(1,234)`` keep their commas.
    """
    text = " ".join(answer.split())
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def parse_number(answer: str | None) -> Fraction | None:
    r"""Return the number that an answer is, exactly: ``-3``, ``0.25``, ``5/4``, ``3 1/2``, ``$12`` or ``50%``, the 50.

    LaTeX is read, too, such as ``\frac{1}{2}``, ``\$12`` or ``1{,}234``. None for anything else, such as a list or a
    word, and for None.
    """
    if answer is None or len(answer) > _MAX_CHARS:
        return None
    for written, plain in _PLAIN.items():
        answer = answer.replace(written, plain)
    match = _NUMBER.fullmatch(normalised(_FRACTION.sub(r" \1/\2", answer)).rstrip("."))
    if match is None or (match[4] and not Fraction(match[4])):
        return None
    number = Fraction(match[2] or 0) + Fraction(match[3]) / Fraction(match[4] or 1)
    return -number if "-" in match[1] else number


def same_answer(found: str | None, right: str) -> bool:
    """Return whether two answers are the same text or the same number, so that ``-4.0`` is ``-4``."""
    if found is None:
        return False
    if found == right:
        return True
    number = parse_number(found)
    return number is not None and number == parse_number(right)
