"""Build in a child process: the parent's side, and the messages between both sides as lines of JSON."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bundles.fields import Role
from edge.errors import (
    BackendError,
    BundleError,
    FewheadsError,
    GoldenError,
    LoadFailed,
    Raw,
    RunnerError,
    UsageError,
    Whole,
    shown,
)
from edge.instruments.memory import MemorySampler
from edge.runtimes import cache
from edge.runtimes.build_child import MORE_MEMORY, mib
from edge.runtimes.runtime import BuildOptions, BuildProgress, Progress, Runtime, Source

log = logging.getLogger(__name__)

#: Seconds between two samples of the memory, and two looks at the request to stop.
_LOOK_SECONDS = 0.2
_EXIT_SECONDS = 10.0
_ERRORS: dict[str, type[FewheadsError]] = {
    error.__name__: error for error in (UsageError, BundleError, GoldenError, BackendError, RunnerError)
}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The parent's request: paths, the names of tier and runtime, and how to build."""

    bundle: str
    tier: str
    role: Role
    cache: str
    runtime: str
    parameter: str
    reason: str
    options: BuildOptions


class Advanced(msgspec.Struct, frozen=True, tag="progress"):
    """The progress of the build."""

    progress: BuildProgress


class Logged(msgspec.Struct, frozen=True, tag="log"):
    """A record of the child's log."""

    logger: str
    level: int
    message: str


class Finished(msgspec.Struct, frozen=True, tag="result"):
    """The end of a build that is now in the cache. The exit may take longer: it frees the device."""


class Failed(msgspec.Struct, frozen=True, tag="error"):
    """The end of a failed build: the parts of its error, and its exit code."""

    kind: str
    subject: str
    given: str
    expected: str
    fix: str
    exit_code: int

    @classmethod
    def of(cls, error: FewheadsError) -> Failed:
        """Return the message for an error."""
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), BackendError.__name__)
        return cls(kind, error.subject, str(shown(error.given)), error.expected, error.fix, error.exit_code)

    @property
    def error(self) -> FewheadsError:
        """The error to raise in the parent."""
        known = _ERRORS.get(self.kind, BackendError)
        return known(self.subject, given=Whole(self.given), expected=self.expected, fix=self.fix)


Message = Advanced | Logged | Finished | Failed
#: Returns the message on a line, or raises msgspec.DecodeError.
decode: Callable[[bytes], Message] = msgspec.json.Decoder(Message).decode


def build_in_child(
    runtime: Runtime,
    source: Source,
    cache_dir: Path | None,
    options: BuildOptions,
    progress: Progress | None,
    stop: threading.Event | None,
) -> None:
    """Build a model in a child process, which puts it into the cache.

    When this returns or raises, the process has ended and has left nothing half-written in the cache. Another thread
    can end the build by setting ``stop``.

    Raises:
        LoadFailed: ``stop`` was set.
        BackendError: the process was killed or crashed.
        FewheadsError: see :func:`edge.runtimes.build.build_here`.
    """
    request = Request(
        bundle=str(source.bundle.path),
        tier=source.tier.name,
        role=source.artifact.role,
        cache=str(cache.cache_directory(cache_dir)),
        runtime=runtime.name,
        parameter=runtime.given_parameter,
        reason=runtime.reason,
        options=options,
    )
    command = [sys.executable, "-m", "edge.runtimes.build_process"]
    # In a session of its own: Ctrl-C reaches only this process, which then ends the child.
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:  # such as no memory for another process
        fix = f"{MORE_MEMORY}, and build again."
        raise BackendError(source.subject, given=Raw(error), expected="a build process", fix=fix) from None
    try:
        with suppress(BrokenPipeError):  # it has died, as the end of its output will show
            assert child.stdin
            child.stdin.write(msgspec.json.encode(request) + b"\n")
            child.stdin.flush()
        _follow(child, source, options, progress, stop or threading.Event())
    finally:
        _end(child)
        with suppress(OSError):
            cache.clean(cache_dir)


def stopped(subject: str) -> LoadFailed:
    """Return the error of a build or a load that another thread has stopped."""
    given, fix = Raw("a request to end it"), "Load the model again."
    return LoadFailed(subject, given=given, expected="none", fix=fix)


class _Memory(NamedTuple):
    """The lowest available memory during a build, and the peak of its process."""

    available_bytes: int | None = None
    peak_bytes: int = 0

    def after(self, process_id: int) -> _Memory:
        readings = {reading.kind: reading.size_bytes for reading in MemorySampler(process_id=process_id).sample()}
        now = readings.get("system_available")
        known = [size for size in (self.available_bytes, now) if size is not None]
        return _Memory(min(known, default=None), max(self.peak_bytes, readings.get("process_peak_rss", 0)))

    def __str__(self) -> str:
        least = "" if self.available_bytes is None else f", with {mib(self.available_bytes)} available at the least"
        return f"at {mib(self.peak_bytes)} of its own{least}"


def _follow(
    child: subprocess.Popen[bytes],
    source: Source,
    options: BuildOptions,
    progress: Progress | None,
    stop: threading.Event,
) -> None:
    memory = _Memory()
    for line in _lines(child):
        if stop.is_set():
            raise stopped(f"build of {source.subject}")
        if line is None:
            memory = memory.after(child.pid)
            continue
        try:
            message = decode(line)
        except msgspec.DecodeError:
            log.warning("the build process wrote a line that is not a message: %r", line[:200])
            continue
        if isinstance(message, Advanced):
            if progress:
                progress(message.progress)
        elif isinstance(message, Logged):
            logging.getLogger(message.logger).log(message.level, "%s", message.message)
        elif isinstance(message, Finished):
            return
        else:
            raise message.error
    raise _died(child, source, options, memory)


def _lines(child: subprocess.Popen[bytes]) -> Iterator[bytes | None]:
    """Yield each line of a child's output until it closes, and None every :data:`_LOOK_SECONDS`."""
    assert child.stdout
    descriptor = child.stdout.fileno()
    rest, looked = b"", 0.0
    while True:
        if time.monotonic() - looked >= _LOOK_SECONDS:
            yield None
            looked = time.monotonic()
        if not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
            continue
        data = os.read(descriptor, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _end(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe:
            with suppress(BrokenPipeError):
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        try:
            child.wait(_LOOK_SECONDS)  # after its last message a child ends by itself
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(_EXIT_SECONDS)


def _died(child: subprocess.Popen[bytes], source: Source, options: BuildOptions, memory: _Memory) -> BackendError:
    try:
        code = child.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:  # its output is closed, and it hangs
        child.kill()
        code = child.wait()
    fix = "See its last lines above or in the log, and build again."
    ended = f"ended with exit status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    given = f"a build process that {ended}, {memory}"
    if -code == signal.SIGKILL:
        given += "; the system kills processes so when memory runs out"
        workspace = options.workspace_bytes // 2**20
        fix = f"{MORE_MEMORY} ({workspace} now), and build again."
    return BackendError(source.subject, given=Whole(given), expected="a build that ends", fix=fix)
