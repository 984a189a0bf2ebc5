"""Readers of the kernel's small files: a number, a name, or a few lines. A file that cannot be read is empty."""

from __future__ import annotations

import os
from pathlib import Path

_LONGEST = 64


def read_text(path: Path, longest: int = _LONGEST) -> str:
    """Return the stripped text of a small file; empty if it cannot be read or is longer.

    Python's files raise a TypeError where a sensor that is off returns EAGAIN; this function does not.
    """
    data = b""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while len(data) <= longest and (part := os.read(file, longest + 1 - len(data))):
                data += part
        finally:
            os.close(file)
    except OSError:
        return ""
    return data.decode(errors="replace").strip("\0 \t\r\n") if len(data) <= longest else ""


def read_name(path: Path, longest: int = _LONGEST) -> str:
    """Return the name in a file; empty if it is not printable."""
    name = read_text(path, longest)
    return name if name.isprintable() else ""


def whole(text: str) -> int | None:
    """Return a decimal number as the kernel writes it; None for anything else, such as ``N/A``."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else None


def entries(directory: Path, prefix: str = "") -> list[Path]:
    """Return the entries of a directory whose names have a prefix, in the order of their numbers."""
    try:
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: (len(name), name))]
