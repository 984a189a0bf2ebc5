"""Calls that end without an answer, and the error that the client raises for each. Knows no transport."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from edge.client import causes
from edge.errors import Literally, ServerError, ServerRefused, Whole, printable
from edge.protocol import RETRY_AFTER_MS

UNAVAILABLE, EXHAUSTED, EXPIRED = "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"
#: Statuses by which a server says that it does not answer this call. The others mean that it could not.
_REFUSED: Final = frozenset(
    (
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "UNAUTHENTICATED",
    )
)
#: What only a client knows, added to the server's sentence.
_OPTIONS: Final = {
    "UNAUTHENTICATED": "Give a token that the server knows with --token-file.",
    "PERMISSION_DENIED": "Give a token that has this scope with --token-file.",
}
_ADVICE: Final = {
    EXPIRED: "Allow more time, or use a server that is less busy.",
    "CANCELLED": "Send it again.",
}
_LOG = "See the server's log."
#: The shape of every error of Fewheads. A failed call whose text looks like this was answered by a Fewheads server.
_SENTENCE: Final = re.compile(r": got .*, expected ", re.DOTALL)
#: Words that gRPC puts before those that matter, as does its report of an answer that is not gRPC.
_PREFIX: Final = re.compile(r"^failed to connect to all addresses; last error: [A-Z_]+: \S+: ")
_NOT_GRPC = "Received http2 header with status"
_MAX_DIGITS = 9
#: gRPC limits a status message to some KiB; the message of an error in a stream has no limit.
_MAX_SENTENCE_CHARS = 4000


@dataclass(frozen=True)
class Refusal:
    """A call that ended with a status instead of an answer.

    Attributes:
        code: gRPC's name of the status.
        details: the server's message, or gRPC's.
        retry_after_ms: the server's hint when to try again; 0 if it gave none.
    """

    code: str
    details: str
    retry_after_ms: int = 0

    @classmethod
    def of(cls, error: Any) -> Refusal:
        """Read an error of gRPC's blocking or asyncio interface."""
        after = {str(key): value for key, value in error.trailing_metadata() or ()}.get(RETRY_AFTER_MS, "")
        # The value is the server's: anything but a short whole number is ignored.
        known = isinstance(after, str) and after.isascii() and after.isdigit() and len(after) <= _MAX_DIGITS
        code, details = error.code().name, error.details() or ""
        # A grpcio server that shuts down cancels new calls without any other message.
        if code == details == "CANCELLED":
            code = UNAVAILABLE
        return cls(code, details, int(after) if known else 0)

    def error(self, subject: str, server: str, attempts: int = 1, *, tls: bool = False) -> ServerError:
        """Return the error to raise: :class:`~edge.errors.ServerRefused` if the server refused the call.

        Args:
            subject: what the call was about.
            server: address of the server.
            attempts: number of attempts, this one included.
            tls: whether the client connects with TLS.
        """
        refused = self.code in _REFUSED and not self.details.startswith(_NOT_GRPC)
        if refused or _SENTENCE.search(self.details):
            given: Literally = Literally(self.code)
            fix = f"{quoted(self.details)} {_OPTIONS.get(self.code, '')}".rstrip()
        else:
            words = printable(_PREFIX.sub("", self.details))[:_MAX_SENTENCE_CHARS]
            given, fix = Whole(f"{self.code} ({words})"), self._advice(tls)
        return (ServerRefused if refused else ServerError)(
            f"{subject} at {server}",
            given=given,
            expected="an answer" if attempts == 1 else f"an answer in {attempts} attempts",
            fix=fix,
            code=self.code,
            server=server,
            attempts=attempts,
            retry_after_ms=self.retry_after_ms,
        )

    def _advice(self, tls: bool) -> str:
        if self.code == UNAVAILABLE or self.details.startswith(_NOT_GRPC):
            return causes.advice(self.details, tls=tls)
        return _ADVICE.get(self.code, _LOG)


def quoted(message: str) -> str:
    """Return a server's own sentence for an error of the client: whole, on one line, safe for a terminal."""
    if not message.strip():
        return f"The server says nothing more. {_LOG}"
    text = printable(message.strip())
    if len(text) > _MAX_SENTENCE_CHARS:
        text = f"{text[:_MAX_SENTENCE_CHARS]}… ({len(text)} characters)"
    return f"The server says: {text}" if text.endswith((".", "!", "?")) else f"The server says: {text}."


def malformed(subject: str, server: str, given: str, expected: str) -> ServerError:
    """Return the error for an answer that contradicts itself or the protocol."""
    fix = "Is it a server of the Open Inference Protocol? Its log may tell more."
    return ServerError(
        f"{subject} at {server}", given=Literally(printable(given)), expected=expected, fix=fix, server=server
    )
