"""Texts without labels: a file of them, and some of ours for models that come without data."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from edge.errors import Raw
from export.errors import DataError

#: A bundle's limit for a text.
MAX_TEXT_BYTES = 16 * 1024
#: Formats that other commands read, by the end of a file's name.
_OTHER_FORMATS = (".csv", ".json", ".jsonl", ".parquet", ".arrow", ".xlsx", ".gz", ".zip")
#: Of different lengths, with names, numbers and punctuation. Written for this purpose.
_SENTENCES = (
    "The train to Lisbon leaves at 7:45 from platform nine.",
    "Anna Keller joined Siemens in Munich last spring.",
    "Good soup.",
    "I would not buy this kettle again, because its lid broke within a week.",
    "Two dogs are running along the beach.",
    "Where can I renew my passport?",
    "The committee postponed its vote on the new harbour until March 2031.",
    "He plays the violin.",
    "Rain is expected in the north of Norway, with gusts of up to 90 km/h near Tromsø.",
    "The film is slow at first, but its last half hour is wonderful!",
    "Please send the invoice to the address below.",
    "Marie Curie was born in Warsaw and worked in Paris.",
    "A woman slices onions in a small kitchen while the radio reports the football results.",
    "Prices rose by 3.2 % in June.",
    "No.",
    "The battery lasts two days, which is more than the maker promises.",
)


def sample_texts(pair: bool) -> tuple[tuple[str, ...], ...]:
    """Return sentences, each alone and each before another one; for ``pair``, each with eight others."""
    count = len(_SENTENCES)
    if pair:
        return tuple(
            (one, _SENTENCES[(at + step) % count]) for at, one in enumerate(_SENTENCES) for step in range(1, 9)
        )
    shifted = cycle([*_SENTENCES[5:], *_SENTENCES[:5]])
    longer = (f"{one} {other}" for one, other in zip(_SENTENCES, shifted, strict=False))
    return tuple((text,) for text in (*_SENTENCES, *longer))


def read_texts(path: Path, pair: bool) -> tuple[tuple[str, ...], ...]:
    """Read a text in each line, or with ``pair`` two texts with a tab between them; empty lines are left out.

    Raises:
        DataError: the file is missing, of another format or not UTF-8, a line has another number of texts or one that a
            server would refuse, or there are fewer than two.
    """
    each = "two texts with a tab between them" if pair else "one text without a tab"
    fix = f"Give a UTF-8 file with {each} in each line."
    if path.suffix.lower() in _OTHER_FORMATS:
        given, expected = Raw(f"a {path.suffix} file"), "lines of text, such as .txt or .tsv"
        raise DataError(f"texts {path}", given=given, expected=expected, fix=fix)
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"texts {path}", given=Raw(error.strerror), expected="a file", fix=fix) from None
    except UnicodeDecodeError as error:
        raise DataError(f"texts {path}", given=Raw(error), expected="UTF-8", fix=fix) from None
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = tuple(text.strip() for text in line.split("\t"))
        if len(found) != 1 + pair or not all(found):
            given = Raw(f"{sum(map(bool, found))} texts in {len(found)} columns")
            raise DataError(f"{path} line {number}", given=given, expected=each, fix=fix)
        size = max(len(text.encode()) for text in found)
        if size > MAX_TEXT_BYTES:
            given, expected = Raw(f"a text of {size} bytes"), f"at most {MAX_TEXT_BYTES}, a bundle's limit"
            raise DataError(f"{path} line {number}", given=given, expected=expected, fix="Shorten it, or leave it out.")
        texts.append(found)
    if len(texts) < 2:
        raise DataError(f"texts {path}", given=Raw(f"{len(texts)} texts"), expected="two at least", fix=fix)
    return tuple(texts)
