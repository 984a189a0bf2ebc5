"""What a server said instead of an answer, and the error that the client's user gets for it. Knows no transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge.errors import Literally, ServerError

UNAVAILABLE, EXHAUSTED, EXPIRED = "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"
#: The trailer, and in a stream the parameter, in which a full server says when there may be room.
RETRY_AFTER_TRAILER, RETRY_AFTER_PARAMETER = "retry-after-ms", "retry_after_ms"
_ADVICE = {
    UNAVAILABLE: "Is it running? `fewheads serve REPOSITORY` starts one, --url names another.",
    EXPIRED: "Allow more time, or ask a server that has less to do.",
    EXHAUSTED: "Send it again later, or in smaller parts.",
    "INTERNAL": "The server's log tells more.",
    "UNAUTHENTICATED": "Give a token that the server knows, with --token-file.",
    "PERMISSION_DENIED": "Give a token that is good for this, with --token-file.",
}
_MAX_DIGITS = 9


@dataclass(frozen=True)
class Refusal:
    """The end of a call that was no answer.

    Attributes:
        code: gRPC's name of the status.
        details: the server's words, or gRPC's.
        retry_after_ms: when there may be room, as the server says; 0 where it does not.
    """

    code: str
    details: str
    retry_after_ms: int = 0

    @classmethod
    def of(cls, error: Any) -> Refusal:
        """Read an error of gRPC, of the blocking or of the asyncio interface."""
        after = {str(key): value for key, value in error.trailing_metadata() or ()}.get(RETRY_AFTER_TRAILER, "")
        # Whatever the server sent: what is no short whole number says nothing.
        known = isinstance(after, str) and after.isascii() and after.isdigit() and len(after) <= _MAX_DIGITS
        code, details = error.code().name, error.details() or ""
        # A server of gRPC's own that shuts down cancels what has just reached it, and has no other words for it.
        if code == details == "CANCELLED":
            code = UNAVAILABLE
        return cls(code, details, int(after) if known else 0)

    def error(self, subject: str, server: str, attempts: int = 1) -> ServerError:
        """Return what a user is told of it."""
        expected = "an answer" if attempts == 1 else f"an answer in {attempts} attempts"
        return ServerError(
            f"{subject} at {server}",
            given=Literally(f"{self.code} ({self.details})"),
            expected=expected,
            fix=_ADVICE.get(self.code, "Correct the request."),
            code=self.code,
            server=server,
            attempts=attempts,
            retry_after_ms=self.retry_after_ms,
        )


def malformed(subject: str, server: str, given: str, expected: str) -> ServerError:
    """Return the error for an answer that contradicts itself or the protocol."""
    fix = "Is it a server of the Open Inference Protocol? Its log may tell more."
    return ServerError(f"{subject} at {server}", given=Literally(given), expected=expected, fix=fix, server=server)
