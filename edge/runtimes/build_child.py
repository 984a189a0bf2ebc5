"""Builds in a child process, from the parent's side: the check of the memory, the process and its messages."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

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
from edge.runtimes.runtime import BuildOptions, BuildProgress, Progress, Runtime, Source

#: The way out of a build without memory.
MORE_MEMORY = "Stop other models and programs, add swap, or lower --workspace-mib"
#: Seconds between two samples of the memory, and two looks at the request to stop.
_LOOK_SECONDS = 0.2
_EXIT_SECONDS = 10.0
MAX_MESSAGE_BYTES = 1024**2
_MIB = 1024**2


_ERRORS: dict[str, type[FewheadsError]] = {
    error.__name__: error for error in (UsageError, BundleError, GoldenError, BackendError, RunnerError)
}


class Request(msgspec.Struct, frozen=True):
    """The parent's request: paths, the names of tier and runtime, and how to build."""

    bundle: str
    tier: str
    role: Role
    cache: str
    runtime: str
    parameter: str
    reason: str
    options: BuildOptions


class Failure(msgspec.Struct, frozen=True):
    """The parts of the error of a failed build."""

    kind: str
    subject: str
    given: str
    expected: str
    fix: str

    @classmethod
    def of(cls, error: FewheadsError) -> Failure:
        return cls(type(error).__name__, error.subject, str(shown(error.given)), error.expected, error.fix)

    @property
    def error(self) -> FewheadsError:
        """The error to raise in the parent."""
        kind = _ERRORS.get(self.kind, BackendError)
        return kind(self.subject, given=Whole(self.given), expected=self.expected, fix=self.fix)


class BuildMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the child. Without a field, its build is in the cache; its exit may take longer.

    ``log`` has the logger, the level and the text of a record.
    """

    progress: BuildProgress | None = None
    log: tuple[str, int, str] | None = None
    failure: Failure | None = None


def check_memory(runtime: Runtime, source: Source, options: BuildOptions, sampler: MemorySampler | None = None) -> None:
    """Check that the system has the memory for a build, unless the options skip this or the memory cannot be read.

    Raises:
        BackendError: the memory does not suffice; the message gives all numbers.
    """
    needed = None if options.ignore_memory else runtime.build_memory(source, options)
    sampler = sampler or MemorySampler()
    available = sampler.available() if needed else None
    if not needed or not available:
        return
    readings = {reading.kind: reading.size_bytes for reading in sampler.sample()}
    swap = readings.get("swap_total", 0) - readings.get("swap_used", 0)
    # A device's memory is pinned, so swap cannot back it.
    if needed.pinned_bytes <= available.size_bytes and needed.size_bytes <= available.size_bytes + swap:
        return
    estimate = f"{_mib(needed.size_bytes)} by the estimate, of which {_mib(needed.pinned_bytes)} cannot be swapped"
    given = Raw(f"{_mib(available.size_bytes)} available ({available.source}) and {_mib(swap)} of free swap")
    fix = f"{MORE_MEMORY} ({options.workspace_bytes // _MIB} now); --ignore-memory builds all the same."
    raise BackendError(f"memory to build {source.subject}", given=given, expected=estimate, fix=fix)


def start(request: Request, *command: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a build process, or another command with the same arguments; return it and the connection to it."""
    connection, its_end = Pipe()
    arguments = [sys.executable, *(command or ("-m", "edge.runtimes.build_process")), str(its_end.fileno())]
    with closing(its_end):
        # In a session of its own: Ctrl-C reaches only this process, which then ends the child.
        child = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[its_end.fileno()])
    with suppress(OSError):  # it has died, as the end of its messages will show
        connection.send_bytes(msgspec.json.encode(request))
    return child, connection


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
    directory = str(cache.cache_directory(cache_dir))
    names = runtime.name, runtime.given_parameter, runtime.reason
    request = Request(str(source.bundle.path), source.tier.name, source.artifact.role, directory, *names, options)
    try:
        child, messages = start(request)
    except OSError as error:  # such as no memory for another process
        fix = f"{MORE_MEMORY}, and build again."
        raise BackendError(source.subject, given=Raw(error), expected="a build process", fix=fix) from None
    try:
        _follow(child, messages, source, options, progress, stop or threading.Event())
    finally:
        messages.close()
        _end(child)
        with suppress(OSError):
            cache.clean(cache_dir)


def stopped(subject: str) -> LoadFailed:
    """Return the error of a build or a load that another thread has stopped."""
    given, fix = Raw("a request to end it"), "Load the model again."
    return LoadFailed(subject, given=given, expected="none", fix=fix)


def _follow(
    child: subprocess.Popen[bytes],
    messages: Connection,
    source: Source,
    options: BuildOptions,
    progress: Progress | None,
    stop: threading.Event,
) -> None:
    available, peak = [], 0
    while True:
        if stop.is_set():
            raise stopped(f"build of {source.subject}")
        readings = {reading.kind: reading.size_bytes for reading in MemorySampler(process_id=child.pid).sample()}
        available += [readings[kind] for kind in ("system_available",) if kind in readings]
        peak = max(peak, readings.get("process_peak_rss", 0))
        if not messages.poll(_LOOK_SECONDS):
            continue
        try:
            message = msgspec.json.decode(messages.recv_bytes(MAX_MESSAGE_BYTES), type=BuildMessage)
        except (EOFError, OSError, msgspec.DecodeError) as error:
            too_long = not messages.readable  # as one above the limit leaves the connection
            if too_long or isinstance(error, msgspec.DecodeError):
                given = Raw(f"more than {MAX_MESSAGE_BYTES} bytes" if too_long else error)
                subject = f"{source.subject}, a message of its build process"
                expected = f"JSON of at most {MAX_MESSAGE_BYTES} bytes"
                fix = "Start this program again, in case fewheads was upgraded meanwhile, and build again."
                raise BackendError(subject, given=given, expected=expected, fix=fix) from None
            least = f", with {_mib(min(available))} available at the least" if available else ""
            raise _died(child, source, options, f"at {_mib(peak)} of its own{least}") from None
        if message.failure:
            raise message.failure.error
        if message.progress and progress:
            progress(message.progress)
        if message.log:
            name, level, text = message.log
            logging.getLogger(name).log(level, "%s", text)
        if message == BuildMessage():
            return


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin
    with suppress(BrokenPipeError):
        child.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        try:
            child.wait(_LOOK_SECONDS)  # after its last message a child ends by itself
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(_EXIT_SECONDS)


def _died(child: subprocess.Popen[bytes], source: Source, options: BuildOptions, memory: str) -> BackendError:
    try:
        code = child.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:  # its messages have ended, and it hangs
        child.kill()
        code = child.wait()
    fix = "See its last lines above or in the log, and build again."
    ended = f"ended with exit status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    given = f"a build process that {ended}, {memory}"
    if -code == signal.SIGKILL:
        given += "; the system kills processes so when memory runs out"
        fix = f"{MORE_MEMORY} ({options.workspace_bytes // _MIB} now), and build again."
    return BackendError(source.subject, given=Whole(given), expected="a build that ends", fix=fix)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"
