"""Start and stop ``fewheads serve`` as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from edge.errors import Raw, ServerError, Whole
from edge.server import Ready

_LOG_LINES = 20


@contextmanager
def running_server(bundles: Sequence[Path], **options: Any) -> Iterator[Ready]:
    """Serve bundles, whose directories have different names, while the block runs; options as for :func:`serving`."""
    with tempfile.TemporaryDirectory(prefix="fewheads-") as directory:
        for bundle in bundles:
            (Path(directory) / bundle.name).symlink_to(bundle.resolve(), target_is_directory=True)
        with serving(Path(directory), **options) as ready:
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
    """Serve a repository on free loopback ports while the block runs, then stop the server with SIGTERM.

    ``arguments`` are more of ``fewheads serve``; ``python`` runs Python, such as an emulator with its arguments. If the
    server does not start, or fails, the ServerError has the end of its log.
    """
    command = [*python, "-m", "edge", "serve", str(repository), "--grpc-port=0", "--metrics-port=0", "--json"]
    command += [f"--target={target}", *([f"--cache={cache}"] if cache else []), "--trace-endpoint=", *arguments]
    # The variables are of a server that the user runs, whose ports, sockets and tokens this one must not take.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FEWHEADS_SERVE_")}
    # A library may log bytes of clients as they are. A reader that failed to decode them would let the pipe fill up.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=variables
    )
    log: deque[str] = deque(maxlen=_LOG_LINES)
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        if not line:
            raise _failure(f"an end with exit code {process.wait()}", "a server that takes requests", log)
        yield msgspec.json.decode(line, type=Ready)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()
    if code != 0:
        raise _failure(f"exit code {code}", "exit code 0", log)


def _failure(given: str, expected: str, log: deque[str]) -> ServerError:
    return ServerError("the started server", given=Raw(given), expected=expected, fix=Whole("Its log: " + "".join(log)))
