"""Messages between a build process and its parent: a request on stdin, and lines of JSON on stdout."""

from __future__ import annotations

import msgspec

from edge.errors import BackendError, BundleError, FewheadsError, GoldenError, RunnerError, UsageError, Whole, shown
from edge.runtimes.runtime import BuildOptions, BuildProgress

_ERRORS: dict[str, type[FewheadsError]] = {
    error.__name__: error for error in (UsageError, BundleError, GoldenError, BackendError, RunnerError)
}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to build.

    Attributes:
        bundle: its directory.
        tier: the name of the tier.
        cache: the directory of the cache.
        runtime: the name of the runtime.
        parameter: its parameter; empty for none.
        reason: why this runtime was chosen.
        options: how to build.
    """

    bundle: str
    tier: str
    cache: str
    runtime: str
    parameter: str
    reason: str
    options: BuildOptions


class Advanced(msgspec.Struct, frozen=True, tag="progress"):
    """The position of the build."""

    progress: BuildProgress


class Logged(msgspec.Struct, frozen=True, tag="log"):
    """A record of the child's log."""

    logger: str
    level: int
    message: str


class Finished(msgspec.Struct, frozen=True, tag="result"):
    """The end of a build that is in the cache now."""


class Failed(msgspec.Struct, frozen=True, tag="error"):
    """The end of a build that failed: the parts of its error, and the exit code of a command."""

    kind: str
    subject: str
    given: str
    expected: str
    fix: str
    exit_code: int

    @classmethod
    def of(cls, error: FewheadsError) -> Failed:
        """Return the message of an error."""
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), BackendError.__name__)
        return cls(kind, error.subject, str(shown(error.given)), error.expected, error.fix, error.exit_code)

    @property
    def error(self) -> FewheadsError:
        """The error to raise in the parent."""
        known = _ERRORS.get(self.kind, BackendError)
        return known(self.subject, given=Whole(self.given), expected=self.expected, fix=self.fix)


Message = Advanced | Logged | Finished | Failed
_DECODER = msgspec.json.Decoder(Message)


def decode(line: bytes) -> Message:
    """Return the message on a line.

    Raises:
        msgspec.DecodeError: it is none.
    """
    message: Message = _DECODER.decode(line)
    return message
