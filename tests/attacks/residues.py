"""What a library does before the server's own code sees anything, and what bounds it."""

from __future__ import annotations

from typing import NamedTuple


class Residue(NamedTuple):
    """An attack that a transport does not withstand, with its figure and the issue of the library at fault."""

    figure: str
    issue: str


#: By attack and transport. ``deploy/THREATS.md`` names each.
RESIDUES: dict[tuple[str, str], Residue] = {}
