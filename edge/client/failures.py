"""Failed calls of a client, and the error that it raises for each, with advice for common mistakes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from edge.errors import Raw, ServerError, ServerRefused, Whole, printable
from edge.protocol import RETRY_AFTER_MS

UNAVAILABLE, EXHAUSTED, EXPIRED = "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"
#: Statuses with which a server rejects a call. The others mean that it failed.
_REFUSED: Final = (
    *("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"),
    *("FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED", "UNAUTHENTICATED"),
)
#: Options of the client, which the server's message cannot name.
_OPTIONS: Final = {
    "UNAUTHENTICATED": "Give a token that the server knows with --token-file.",
    "PERMISSION_DENIED": "Give a token that has this scope with --token-file.",
}
_LOG = "See the server's log."
_ADVICE: Final = {EXPIRED: "Allow more time, or use a server that is less busy.", "CANCELLED": "Send it again."}
#: The form of every Fewheads error: a message of this form comes from a Fewheads server, others from gRPC.
_SENTENCE: Final = re.compile(r": (?:got .*, )?expected ", re.DOTALL)
#: Leading words of gRPC's message that say nothing.
_PREFIX: Final = re.compile(r"^failed to connect to all addresses; last error: [A-Z_]+: \S+: ")
_NOT_GRPC = "Received http2 header with status"
_MAX_DIGITS = 9
#: gRPC limits a status message to some KiB; the message of an error in a stream has no limit.
_MAX_MESSAGE_CHARS = 4000

_RUNNING: Final = "Is it running? `fewheads serve REPOSITORY` starts one, --url names another."
_HTTP_PORT: Final = "That is an HTTP port; gRPC is on --grpc-port, 8001 by default."
_AFTER_HANDSHAKE: Final = (
    "after the TLS handshake. If it needs a client certificate, give --tls-certificate and --tls-key."
)
_OTHER_NAME: Final = (
    "The server's certificate is for another name. Connect by a name in it, or issue one for this name."
)
_CLOSED: Final = "The server closed the connection at once. If it uses TLS, connect with --tls, or with --tls-ca FILE."
_UNTRUSTED: Final = "The server's certificate is not trusted. Give the PEM file of its authority with --tls-ca."
_IPV6: Final = "No server listens on ::1, the last address of that host. Connect to 127.0.0.1, whose answer says more."
#: Parts of gRPC's message, whether the client uses TLS (None: either way), and what to do. gRPC's status is UNAVAILABLE
#: for all of these. The first match counts.
_CAUSES: Final[tuple[tuple[tuple[str, ...], bool | None, str], ...]] = (
    (("failed to connect", "Socket closed"), False, _CLOSED),
    (("failed to connect", "Socket closed"), True, f"The server closed the connection {_AFTER_HANDSHAKE}"),
    (("Connection reset",), True, f"The server ended the connection during or {_AFTER_HANDSHAKE}"),
    (("WRONG_VERSION_NUMBER",), True, "That port does not use TLS. Leave out --tls and the other TLS options."),
    (("certificate has expired",), True, "The server's certificate, or its authority's, has expired. Renew it."),
    (("is not yet valid",), True, "The server's certificate is not valid yet. Compare the clocks of both hosts."),
    (("CERTIFICATE_VERIFY_FAILED",), True, _UNTRUSTED),
    (("Hostname Verification",), True, _OTHER_NAME),
    (("selected ALPN",), True, _HTTP_PORT),
    (("Failed parsing HTTP/2",), None, _HTTP_PORT),
    ((_NOT_GRPC,), None, "A web server or proxy answered, not a gRPC server."),
    (("Failed to parse port",), None, "Give --url as HOST:PORT, for example 127.0.0.1:8001."),
    (("::1", "Connection refused"), None, f"{_IPV6} {_RUNNING}"),
    ((":443: ", "Connection refused"), None, f"Does --url name the port? 8001 is the default. {_RUNNING}"),
    (("errors resolving",), None, "No address is known for that host. Give --url as HOST:PORT."),
)


@dataclass(frozen=True)
class FailedCall:
    """A call that ended with a status instead of an answer.

    Attributes:
        code: gRPC's name of the status.
        details: the server's message, or gRPC's.
        retry_after_ms: the server's hint when to try again; 0 without one.
    """

    code: str
    details: str
    retry_after_ms: int = 0

    @classmethod
    def of(cls, error: Any) -> FailedCall:
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
        """Return the error to raise: :class:`~edge.errors.ServerRefused` if the server rejected the call."""
        refused = self.code in _REFUSED and not self.details.startswith(_NOT_GRPC)
        if refused or _SENTENCE.search(self.details):
            given = Raw(self.code)
            fix = f"{quoted(self.details)} {_OPTIONS.get(self.code, '')}".rstrip()
        else:
            words = printable(_PREFIX.sub("", self.details))[:_MAX_MESSAGE_CHARS]
            given, fix = Whole(f"{self.code} ({words})"), self._advice(tls)
        return (ServerRefused if refused else ServerError)(
            f"{subject} at {server}",
            given=given,
            expected="an answer" if attempts == 1 else f"an answer in {attempts} attempts",
            fix=Whole(fix),
            code=self.code,
            server=server,
            attempts=attempts,
            retry_after_ms=self.retry_after_ms,
        )

    def _advice(self, tls: bool) -> str:
        if self.code != UNAVAILABLE and not self.details.startswith(_NOT_GRPC):
            return _ADVICE.get(self.code, _LOG)
        for words, with_tls, advice in _CAUSES:
            if with_tls in (None, tls) and all(part in self.details for part in words):
                return advice
        return _RUNNING


def quoted(message: str) -> str:
    """Return a server's message as a sentence of the client's error: on one line, safe for a terminal."""
    if not message.strip():
        return f"The server says nothing more. {_LOG}"
    text = printable(message.strip())
    if len(text) > _MAX_MESSAGE_CHARS:
        text = f"{text[:_MAX_MESSAGE_CHARS]}… ({len(text)} characters)"
    return f"The server says: {text}" if text.endswith((".", "!", "?")) else f"The server says: {text}."


def malformed(subject: str, server: str, given: str, expected: str) -> ServerError:
    """Return the error for an answer that contradicts itself or the protocol."""
    fix = "Check that it is a server of the Open Inference Protocol, and see its log."
    return ServerError(f"{subject} at {server}", given=Raw(printable(given)), expected=expected, fix=fix, server=server)
