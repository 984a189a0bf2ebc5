"""What a library does before the server's own code sees anything, and what bounds it."""

from __future__ import annotations

from typing import NamedTuple


class Residue(NamedTuple):
    """An attack that a transport does not withstand, with its figure and the issue of the library at fault."""

    figure: str
    issue: str


#: By attack and transport. ``deploy/THREATS.md`` names each.
RESIDUES: dict[tuple[str, str], Residue] = {
    ("unfinished-messages", "grpcio"): Residue("980 MB of messages that the core buffers", "grpc/grpc#43012"),
    ("unfinished-messages-without-token", "grpcio"): Residue(
        "990 MB of messages that the core buffers before it knows who sends them", "grpc/grpc#29836"
    ),
    ("large-ids-that-wait", "grpcio"): Residue("1.3 GB of whole messages of 60 MB at once", "grpc/grpc#10597"),
    ("texts-that-are-too-many", "grpcio"): Residue("640 MB of whole messages of 60 MB at once", "grpc/grpc#10597"),
}
