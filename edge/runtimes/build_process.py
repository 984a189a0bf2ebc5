"""Child process of a build: ``python -m edge.runtimes.build_process DESCRIPTOR``.

It takes a :class:`edge.runtimes.build_child.Request` from the connection DESCRIPTOR, answers with messages of that
module, and exits. It ends when stdin closes, so it never outlives its parent. Its exit frees the gigabyte of the
builder's kernels.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from edge.bundles.bundle import Bundle
from edge.child import end_with_parent
from edge.errors import BackendError, FewheadsError, Raw, elided
from edge.runtimes.build import build_here
from edge.runtimes.build_child import MORE_MEMORY, BuildMessage, Failure, Request
from edge.runtimes.runtime import Source
from edge.runtimes.table import RUNTIMES

log = logging.getLogger(__name__)

_NICENESS = 5
_OOM_SCORE = "800"
#: Of a record of the log; JSON needs at most six bytes for each.
_MOST_LOG_CHARS = 100_000


class _Channel(logging.Handler):
    """Sends messages to the parent, including log records, from any thread."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.INFO)
        self._connection, self._sending = connection, threading.Lock()

    def send(self, message: BuildMessage) -> None:
        with self._sending:
            self._connection.send_bytes(msgspec.json.encode(message))

    def emit(self, record: logging.LogRecord) -> None:
        text = elided(self.format(record), _MOST_LOG_CHARS)
        self.send(BuildMessage(log=(record.name, record.levelno, text)))


def main() -> None:
    """Build the model of the request on stdin. The exit code is 0, or that of the error in the last message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    # Servers get the processor first, and the system kills this process before them when memory runs out.
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    os.dup2(2, 1)  # libraries print to stdout, which is the parent's
    connection = Connection(int(sys.argv[1]))
    channel = _Channel(connection)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[channel])
    request = msgspec.json.decode(connection.recv_bytes(), type=Request)
    end_with_parent()
    try:
        runtime = RUNTIMES[request.runtime](request.parameter)
        runtime.reason = request.reason
        source = Source.of(Bundle.open(request.bundle, models=False), runtime, request.tier, request.role)
        build_here(runtime, source, Path(request.cache), request.options, lambda now: channel.send(BuildMessage(now)))
    except (FewheadsError, MemoryError) as error:
        if isinstance(error, MemoryError):
            given, fix = Raw("a build process without memory"), f"{MORE_MEMORY}."
            error = BackendError(request.bundle, given=given, expected="a build that ends", fix=fix)
        channel.send(BuildMessage(failure=Failure.of(error)))
        _exit(error.exit_code)
    except Exception:
        log.exception("the build process failed")
        _exit(1)
    channel.send(BuildMessage())
    _exit(0)


def _exit(code: int) -> None:
    """End without tearing down the libraries, which may crash or hang without their device."""
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
