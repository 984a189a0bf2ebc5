"""Base of the blocking and the asyncio client: servers, connections, attempts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeVar

from edge.client.connection import Credentials, ServerConnection
from edge.client.failures import FailedCall
from edge.client.inference import CallInfo, checked_timeout
from edge.client.retries import DEFAULT_RETRIES, Attempts, Budget, Retries, RoundRobin
from edge.client.rpcs import CallSpec
from edge.errors import Raw, UsageError

DEFAULT_URL: Final = "127.0.0.1:8001"
R = TypeVar("R")


class BaseClient:
    """Connections to one server, or to several that serve the same models.

    Every call raises a :class:`ServerError` with status, server and number of attempts if no server answers it, a
    :class:`ServerRefused` if a server refuses it, and a :class:`UsageError` if an argument is out of range.

    Args:
        url: ``host:port``, or several of them, which take turns.
        timeout_seconds: time limit of a call, all its attempts together.
        retries: limits of the retries; :data:`ONCE` disables them.
        credentials: TLS and a token, the same for all servers; None uses neither.

    Attributes:
        servers: addresses of the servers.
    """

    _transport: ClassVar[Any]  # grpc or grpc.aio

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        timeout_seconds: float = 10.0,
        *,
        retries: Retries = DEFAULT_RETRIES,
        credentials: Credentials | None = None,
    ) -> None:
        self.servers = (url,) if isinstance(url, str) else tuple(url)
        if not self.servers or not all(self.servers) or len(set(self.servers)) < len(self.servers):
            fix = "Name each server once."
            raise UsageError("url", given=list(self.servers), expected="one server, or different ones", fix=fix)
        self._timeout_seconds = checked_timeout(timeout_seconds)
        self._retries, self._budget = retries, Budget(retries)
        self._round_robin = RoundRobin(len(self.servers))
        self._tls = bool(credentials and credentials.tls)
        self._connections = [ServerConnection(server, credentials, self._transport) for server in self.servers]
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self._process_id = os.getpid()
        self._closed = False

    def _begin(self, server: str, timeout_seconds: float | None, repeatable: bool = False) -> Attempts:
        self._check_usable()
        if server and server not in self.servers:
            fix = "Leave it out to use any of them."
            raise UsageError("server", given=server, expected=f"one of {', '.join(self.servers)}", fix=fix)
        return Attempts(
            self._round_robin,
            self._retries,
            self._budget,
            repeatable=repeatable,
            timeout_seconds=None if timeout_seconds is None else checked_timeout(timeout_seconds),
            server=self.servers.index(server) if server else None,
        )

    def _begin_call(self, make: Callable[[], CallSpec[R]]) -> tuple[CallSpec[R], Attempts]:
        rpc = make()
        if rpc.changes_server and not rpc.server and len(self.servers) > 1:
            given, fix = Raw(f"{len(self.servers)} servers"), "Name it with server=; change one server at a time."
            raise UsageError(f"server for {rpc.subject}", given=given, expected="one of them", fix=fix)
        limit = self._timeout_seconds if rpc.timeout_seconds is None else rpc.timeout_seconds
        return rpc, self._begin(rpc.server, limit, rpc.repeatable)

    def _start(self, attempts: Attempts, method: str, request: Any) -> Any:
        return self._connections[attempts.server].call(method, request, attempts.start())

    def _answered(self, attempts: Attempts) -> CallInfo:
        taken_ns = attempts.answered()
        return CallInfo(server=self.servers[attempts.server], attempts=attempts.count, round_trip_ns=taken_ns)

    def _failed(self, attempts: Attempts, failure: FailedCall, subject: str) -> float:
        """Record a failed attempt; return the seconds to wait before the next, or raise the error of the last."""
        server, count = attempts.server, attempts.count
        if self._round_robin.failed(server, failure, time.monotonic()) and len(self.servers) > 1 and not self._closed:
            self._watch(server)
        pause = attempts.failed(failure)
        if pause is None:
            raise failure.error(subject, self.servers[server], count, tls=self._tls) from None
        return pause

    def _watch(self, server: int) -> None:
        """Put a lost server back into the rotation once its connection is back."""
        with self._lock:
            if server in self._lost:
                return
            self._lost.add(server)

        def connected() -> None:
            self._lost.discard(server)
            self._round_robin.connected(server)

        try:
            self._connections[server].when_connected(connected)
        except ValueError:  # another thread has closed the channel
            connected()

    def _check_usable(self) -> None:
        if self._closed:
            given = Raw("a call after close()")
            raise UsageError("the client", given=given, expected="none", fix="Make a new client.")
        if os.getpid() != self._process_id:  # a fork ends gRPC's threads
            given = Raw(f"a call in process {os.getpid()}, a fork of {self._process_id}")
            fix = "Make a client in each process, after the fork."
            raise UsageError("the client", given=given, expected="one of this process", fix=fix)
