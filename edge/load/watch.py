"""The server's memory while it is asked: read by a thread of its own, from the server's Telemetry."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from edge.client import Client
from edge.client.connection import Credentials
from edge.errors import ServerError
from edge.load.report import Memory

_INTERVAL_SECONDS = 1.0
#: A server that is frozen must not hold up the report.
_TIMEOUT_SECONDS = 1.0


class MemoryWatch:
    """Reads the resident memory of a server at once, every second, and at the end; a context manager.

    Args:
        url: the server, ``host:port``.
        credentials: to reach it with.
    """

    def __init__(self, url: str, credentials: Credentials | None = None) -> None:
        self._client = Client(url, _TIMEOUT_SECONDS, credentials=credentials)
        self._samples: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._begun = time.perf_counter()
        self._read()
        if self._samples:  # otherwise it has no Telemetry
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread.ident:
            self._thread.join()
            self._read()
        self._client.close()

    @property
    def memory(self) -> Memory | None:
        """What was read; None where the server does not tell."""
        if not self._samples:
            return None
        sizes = [size for _, size in self._samples]
        return Memory(sizes[0], sizes[-1], max(sizes), tuple(self._samples))

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_SECONDS):
            self._read()

    def _read(self) -> None:
        try:
            reading = self._client.telemetry()
        except ServerError:
            return  # another server, or none; the outcomes of the requests say more
        now = time.perf_counter() - self._begun
        self._samples += [(now, memory.size_bytes) for memory in reading.memory if memory.kind == "process_rss"]
