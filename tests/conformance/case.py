"""What a case is."""

from __future__ import annotations

from typing import NamedTuple

from tests.conformance.peer import Ask


class Case(NamedTuple):
    """One thing to ask both servers.

    Attributes:
        name: what is asked.
        ask: asks it, and leaves the server as it was.
        triton: what Triton answers: a status, and what of the response matters.
        ours: what this server answers, where that is something else.
        reason: why it does.
    """

    name: str
    ask: Ask
    triton: str
    ours: str = ""
    reason: str = ""

    @property
    def expected(self) -> str:
        """What this server answers."""
        return self.ours or self.triton
