"""Every error that Fewheads raises on purpose.

- FewheadsError
  - UsageError             a setting, option or argument is wrong
  - BundleError            a bundle directory breaks its format, or cannot be read or written
  - GoldenError            a model does not reproduce the golden outputs of its bundle
  - BackendError           a runtime is missing, or refuses or fails to build a model
  - ServerError            the server cannot be reached, or gives no usable answer
    - ServerRefused        the server refused a client's call
  - DeviceFailed           the server computes nothing any more; only a new process helps
  - RunStuck               a run of the server does not end
  - DrainTimeout           a shutdown did not end in time
  - RequestError           one inference request cannot be answered
    - InvalidRequest       the request contradicts the model's metadata or the protocol
    - NotFound             no such model, version or shared memory
    - AlreadyThere         the name of a shared memory region is taken
    - Unauthenticated      no token, or one that the server does not know
    - PermissionDenied     the token is good for something else
    - LoadFailed           a model could not be loaded; what was served before is served still
    - ModelNotReady        the model exists and cannot answer now
    - Overloaded           the queue is full, or another bound of the server is reached
    - DeadlineExceeded     the deadline passed before the answer was ready
    - Unsupported          a protocol feature that this server does not offer
    - RunnerError          the runtime failed while computing

A message always has four parts: the subject, what was given, what was expected, and the way out.
This module imports nothing of ours, so that every other module may import it.
"""

from __future__ import annotations

from typing import ClassVar

_MAX_GIVEN_CHARS = 160


def shown(value: object) -> str:
    """Return ``repr(value)``, cut so that a huge or hostile value cannot flood a message or a log."""
    if isinstance(value, Whole):
        return value
    text = value if isinstance(value, Literally) else repr(value)
    return text if len(text) <= _MAX_GIVEN_CHARS else f"{text[:_MAX_GIVEN_CHARS]}… ({len(text)} characters)"


def printable(text: str) -> str:
    """Return text of unknown origin on one line, with control and formatting characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class Literally(str):
    """Text for ``given`` that is a description, not a value, and is shown without quotes."""


class Whole(Literally):
    """A description that is never cut; its author has already limited its length."""


class FewheadsError(Exception):
    """The base: ``subject: got given, expected expected. fix``.

    Args:
        subject: what is wrong, by the name that its owner knows it by.
        given: the value found; wrap a description in :class:`Literally`.
        expected: what would have been right.
        fix: one sentence that says what to do next.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, subject: str, *, given: object, expected: str, fix: str) -> None:
        super().__init__(f"{subject}: got {shown(given)}, expected {expected}. {fix}")
        self.subject = subject
        self.given = given
        self.expected = expected
        self.fix = fix


#: The only text that a client gets for an unexpected error.
INTERNAL = "internal error; the server's log tells more"


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
    """A runtime is missing, or refuses or fails to build a model."""

    exit_code = 5


class ServerError(FewheadsError):
    """The server cannot be reached, failed, or gave an answer that makes no sense.

    Args:
        subject: what is wrong; this and the next three are as in every error.
        given: the value found.
        expected: what would have been right.
        fix: what to do next.
        code: gRPC's name of the status; empty if the call did not end with one.
        server: address of the server; empty if no server was called.
        attempts: number of attempts, on all servers together.
        retry_after_ms: the server's hint when to try again; 0 if it gave none.
    """

    exit_code = 6

    def __init__(
        self,
        subject: str,
        *,
        given: object,
        expected: str,
        fix: str,
        code: str = "",
        server: str = "",
        attempts: int = 1,
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(subject, given=given, expected=expected, fix=fix)
        self.code = code
        self.server = server
        self.attempts = attempts
        self.retry_after_ms = retry_after_ms


class ServerRefused(ServerError):
    """The server refused a client's call: sending the same call again does not help, or not yet."""

    exit_code = 7


class DeviceFailed(FewheadsError):
    """The server computes nothing any more: its device, or a thread of its own, is lost. Only a new process helps."""

    exit_code = 8


class RunStuck(FewheadsError):
    """A run of the server does not end, and cannot be ended but with its process."""

    exit_code = 9


class DrainTimeout(FewheadsError):
    """A shutdown did not end in time, so the process was."""

    exit_code = 10


class RequestError(FewheadsError):
    """One inference request cannot be answered; the server goes on."""

    exit_code = 7


class InvalidRequest(RequestError):
    """The request contradicts the model's metadata or the protocol."""


class NotFound(RequestError):
    """There is no such model, version or shared memory."""


class AlreadyThere(RequestError):
    """The name of a shared memory region is taken."""


class Unauthenticated(RequestError):
    """The call brings no token, or one that the server does not know."""


class PermissionDenied(RequestError):
    """The caller's token is good for something else."""


class LoadFailed(RequestError):
    """A model could not be loaded; what was served before is served still."""


class ModelNotReady(RequestError):
    """The model exists and cannot answer now."""


class Overloaded(RequestError):
    """The queue is full, the deadline cannot be met, or another bound of the server is reached.

    Args:
        subject: as of every error, and so on.
        given: the value found.
        expected: what would have been right.
        fix: what to do next.
        cause: which bound of the queue refused, ``requests``, ``bytes`` or ``deadline``; empty for others.
        retry_after_ms: when there may be room; 0 where nothing is known.
    """

    def __init__(
        self, subject: str, *, given: object, expected: str, fix: str, cause: str = "", retry_after_ms: int = 0
    ) -> None:
        super().__init__(subject, given=given, expected=expected, fix=fix)
        self.cause = cause
        self.retry_after_ms = retry_after_ms


class DeadlineExceeded(RequestError):
    """The deadline passed before the answer was ready."""


class Unsupported(RequestError):
    """A feature of the protocol that this server does not offer."""


class RunnerError(RequestError):
    """The runtime failed while computing; its own text stays in the log."""
