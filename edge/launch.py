"""Start ``fewheads serve`` as a process of its own, and end it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from edge.errors import Literally, ServerError
from edge.server import Ready

_LOG_LINES = 20


@contextmanager
def running_server(
    bundles: Sequence[Path],
    *,
    target: str = "auto",
    cache: Path | None = None,
    arguments: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
) -> Iterator[Ready]:
    """Serve bundles on free loopback ports while the block runs, then stop the server by SIGTERM.

    Args:
        bundles: the bundles to serve; no two directories of the same name.
        target: the runtime.
        cache: directory of built models.
        arguments: more arguments of ``fewheads serve``.
        python: command that runs Python, such as an emulator with its arguments.

    Raises:
        ServerError: it did not start, or did not end well; the message holds the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="fewheads-") as directory:
        for bundle in bundles:
            (Path(directory) / bundle.name).symlink_to(bundle.resolve(), target_is_directory=True)
        with serving(Path(directory), target=target, cache=cache, arguments=arguments, python=python) as ready:
            yield ready


@contextmanager
def serving(
    repository: Path,
    *,
    target: str = "auto",
    cache: Path | None = None,
    arguments: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
) -> Iterator[Ready]:
    """Serve a repository whose bundles may change meanwhile; otherwise like :func:`running_server`.

    Raises:
        ServerError: as :func:`running_server`.
    """
    command = [*python, "-m", "edge", "serve", str(repository), "--grpc-port=0", "--metrics-port=0", "--json"]
    command += [f"--target={target}", *([f"--cache={cache}"] if cache else []), *arguments]
    # gRPC's core logs what strangers sent as it came; a reader that stumbled over it would leave the pipe full.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    log: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=_collect, args=(process.stderr, log), daemon=True)
    reader.start()
    try:
        yield _ready(process, process.stdout, log)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()
    if code != 0:
        raise _failure(f"exit code {code}", "exit code 0", log)


def _ready(process: subprocess.Popen[str], stdout: IO[str], log: list[str]) -> Ready:
    line = stdout.readline()
    if line:
        return msgspec.json.decode(line, type=Ready)
    process.wait()
    raise _failure(f"an end with exit code {process.returncode}", "a server that takes requests", log)


def _collect(stream: IO[str], log: list[str]) -> None:
    for line in stream:
        log.append(line)
        del log[:-_LOG_LINES]


def _failure(given: str, expected: str, log: list[str]) -> ServerError:
    return ServerError("the started server", given=Literally(given), expected=expected, fix="Its log: " + "".join(log))
