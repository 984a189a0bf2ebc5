"""Every error that Fewheads raises on purpose.

The hierarchy, with the exit code of the command line::

    FewheadsError 1
        UsageError 2, BundleError 3, GoldenError 4, BackendError 5
        ServerError 6
            ServerRefused 7
        DeviceFailed 8, RunStuck 9, DrainTimeout 10
        RequestError 7
            InvalidRequest, NotFound, AlreadyThere, Unauthenticated, PermissionDenied, LoadFailed, ModelNotReady,
            Overloaded, DeadlineExceeded, Unsupported, RunnerError

Every message has four parts: the subject, the value given, the value expected, and a fix. The value given is left out
where there is none, as of an option that excludes another one.
This module imports nothing from the rest of the package, so that every other module can import it.
"""

from __future__ import annotations

from typing import ClassVar, Final

#: The only text that a client gets for an unexpected error.
INTERNAL = "internal error; see the server's log"

#: The most characters of each part of an error. As ``grpc-message``, names that fill two parts take at most 5 of the
#: 8 KiB of headers that clients of gRPC accept.
_MOST_CHARS: Final = {"subject": 240, "given": 160, "expected": 800, "fix": 1000}


def shown(value: object) -> str:
    """Return ``repr(value)``, cut so that a huge or hostile value cannot flood a message or a log."""
    if isinstance(value, Whole):
        return value
    most, literal, size = _MOST_CHARS["given"], isinstance(value, Raw), 0
    if isinstance(value, str | bytes) and len(value) > most:  # before repr, which would escape all of it
        size, value = len(value), value[: most + 1]
    text = str(value) if literal else repr(value)
    return text if len(text) <= most else f"{text[:most]}… ({size or len(text)} characters)"


def printable(text: str, keep: str = "") -> str:
    """Return text of unknown origin with control and formatting characters escaped, but those in ``keep``.

    The result can be encoded, unlike names of files that are not UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def elided(text: str, most: int) -> str:
    """Return text of at most so many characters; of longer text both ends and its length."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]} ({len(text)} characters)"


class Raw(str):
    """Text for ``given`` that describes a value, and is shown without quotes."""


class Whole(Raw):
    """Text for any part of an error that is never cut, because its author limits its length."""


#: The ``given`` of an error that has none.
NOTHING: Final = Raw("")


class FewheadsError(Exception):
    """Base of all errors, with the message ``subject: got given, expected expected. fix``.

    Each part is cut to a length of its own, whatever it quotes.

    Args:
        subject: the setting, file, field or model that is wrong.
        given: the value found; wrap a description in :class:`Raw`. Without it, the message has no ``got``.
        expected: the valid values.
        fix: one sentence that says what to do next.
    """

    exit_code: ClassVar[int] = 1
    lacks_memory = False  # of a load: whether it may succeed when another model has been unloaded

    def __init__(self, subject: str, *, given: object = NOTHING, expected: str, fix: str) -> None:
        self.subject, self.given = _part("subject", subject), given
        self.expected, self.fix = _part("expected", expected), _part("fix", fix)
        got = "" if given == NOTHING and isinstance(given, Raw) else f"got {shown(given)}, "
        super().__init__(printable(f"{self.subject}: {got}expected {self.expected}. {self.fix}", keep="\n"))


def _part(name: str, text: str) -> str:
    return text if isinstance(text, Whole) else elided(text, _MOST_CHARS[name])


class UsageError(FewheadsError):
    """A setting, option or argument is wrong."""

    exit_code = 2


class BundleError(FewheadsError):
    """A bundle breaks its format, or cannot be read or written."""

    exit_code = 3


class GoldenError(FewheadsError):
    """A model does not reproduce the golden outputs of its bundle."""

    exit_code = 4


class BackendError(FewheadsError):
    """A runtime is missing, or it rejects a model or fails to build it."""

    exit_code = 5


class ServerError(FewheadsError):
    """The server cannot be reached, fails, or sends an invalid response.

    Attributes:
        code: name of the gRPC status; empty if the call did not end with one.
        server: its address; empty if no server was called.
        attempts: on all servers together.
        retry_after_ms: the server's hint; 0 without one.
    """

    exit_code = 6

    def __init__(
        self,
        subject: str,
        *,
        given: object = NOTHING,
        expected: str,
        fix: str,
        code: str = "",
        server: str = "",
        attempts: int = 1,
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(subject, given=given, expected=expected, fix=fix)
        self.code, self.server, self.attempts, self.retry_after_ms = code, server, attempts, retry_after_ms


class ServerRefused(ServerError):
    """The server rejects a client's call; the same call fails again, at least for now."""

    exit_code = 7


class DeviceFailed(FewheadsError):
    """The device, or a thread that the server needs, is lost. Only a new process recovers."""

    exit_code = 8


class RunStuck(FewheadsError):
    """A run does not end, and only the end of the process stops it."""

    exit_code = 9


class DrainTimeout(FewheadsError):
    """A shutdown takes too long, so the process exits without waiting for the rest."""

    exit_code = 10


class RequestError(FewheadsError):
    """The server cannot answer one inference request; others are not affected."""

    exit_code = 7


class InvalidRequest(RequestError):
    """The request contradicts the model's metadata or the protocol."""


class NotFound(RequestError):
    """There is no such model, version or shared memory region."""


class AlreadyThere(RequestError):
    """A shared memory region of that name exists."""


class Unauthenticated(RequestError):
    """The call has no token, or one that the server does not know."""


class PermissionDenied(RequestError):
    """The token has no scope for this call."""


class LoadFailed(RequestError):
    """A model cannot be loaded; an earlier version of it still serves."""


class ModelNotReady(RequestError):
    """The model exists and is not READY."""


class Overloaded(RequestError):
    """The queue is full, the deadline cannot be met, or another limit of the server is reached.

    Attributes:
        cause: the limit of the queue, ``requests``, ``bytes`` or ``deadline``, ``cache`` or ``models``; or empty.
        retry_after_ms: when there may be room; 0 if unknown.
    """

    def __init__(
        self,
        subject: str,
        *,
        given: object = NOTHING,
        expected: str,
        fix: str,
        cause: str = "",
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(subject, given=given, expected=expected, fix=fix)
        self.cause, self.retry_after_ms = cause, retry_after_ms


class DeadlineExceeded(RequestError):
    """The deadline passes before the response is ready."""


class Unsupported(RequestError):
    """The server does not offer a feature of the protocol."""


class RunnerError(RequestError):
    """The runtime fails while it computes; its own message is only in the log."""
