"""Answers in texts: where they are, what number they are, and whether two are equal."""

from __future__ import annotations

import re
from fractions import Fraction

#: Stands before the answer, once in each text, as in GSM8K.
MARK = "####"
#: Longer texts are not read as numbers; their digits would take seconds.
_MAX_CHARS = 64
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_NUMBER = re.compile(r"([+-]?)\$?(\d+(?:\.\d*)?|\.\d+)(?:/(\d+(?:\.\d*)?))?%?", re.ASCII)


def parse_answer(text: str) -> str | None:
    """Return what follows the first :data:`MARK` on its line, normalised; None without a mark or anything after it."""
    _, mark, rest = text.partition(MARK)
    line = rest.partition("\n")[0].partition(MARK)[0]
    return normalised(line) or None if mark else None


def normalised(answer: str) -> str:
    """Return an answer without thousands separators, and with single spaces: ``1,234`` becomes ``1234``."""
    return _THOUSANDS.sub("", " ".join(answer.split()))


def parse_number(answer: str | None) -> Fraction | None:
    """Return the number that an answer is, exactly: ``-3``, ``0.25``, ``5/4``, ``$12`` or ``50%``, which is 50.

    None for anything else, such as a list or a word, and for None.
    """
    match = _NUMBER.fullmatch(answer.rstrip(".")) if answer and len(answer) <= _MAX_CHARS else None
    if match is None or (match[3] and not Fraction(match[3])):
        return None
    number = Fraction(match[2]) / Fraction(match[3] or 1)
    return -number if match[1] == "-" else number


def same_answer(found: str | None, right: str) -> bool:
    """Return whether two answers are the same text or the same number, so that ``-4.0`` is ``-4``."""
    if found is None:
        return False
    if found == right:
        return True
    number = parse_number(found)
    return number is not None and number == parse_number(right)
