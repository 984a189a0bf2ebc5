"""One case of conformance, and reasons that several of them share."""

from __future__ import annotations

from typing import NamedTuple

from tests.conformance.peer import Action

AS_ELSEWHERE = "As in every other RPC, Triton's included."
CLIENTS_ERROR = "It is the client's error."
NO_TYPING_ERROR = "A typing error should not pass for a success."
OTHER_RUNTIME = "Another runtime."
STARTED_SO = "Tracing is set where the server is started."


class Case(NamedTuple):
    """Something to do with both servers.

    Attributes:
        name: what the client does.
        action: does it, and leaves the server as it was.
        triton: Triton's outcome: a status, and the part of the response that matters.
        ours: this server's outcome if it differs.
        reason: why it differs.
        text: part of this server's error message.
    """

    name: str
    action: Action
    triton: str
    ours: str = ""
    reason: str = ""
    text: str = ""

    @property
    def expected(self) -> str:
        """This server's outcome."""
        return self.ours or self.triton
