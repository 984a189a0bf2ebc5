"""What a library does before the server's own code sees anything, and what bounds it."""

from __future__ import annotations

from typing import NamedTuple


class Residue(NamedTuple):
    """An attack that a transport does not withstand, with its figure and the issue of the library at fault."""

    figure: str
    issue: str


#: By attack and transport. ``deploy/THREATS.md`` names each.
RESIDUES: dict[tuple[str, str], Residue] = {
    ("unfinished-messages", "grpcio"): Residue("1 GB of messages that gRPC's core buffers", "grpc/grpc#43012"),
    ("unfinished-messages-without-token", "grpcio"): Residue(
        "1 GB of messages that gRPC's core buffers before anyone asks for them", "grpc/grpc#29836"
    ),
    ("large-ids-that-wait", "grpcio"): Residue(
        "1.4 GB and waits of 4 s, because gRPC's core copies all messages at once", "grpc/grpc#10597"
    ),
    ("texts-that-are-too-many", "grpcio"): Residue(
        "0.7 GB and waits of 2 s, because gRPC's core copies all messages at once", "grpc/grpc#10597"
    ),
}
