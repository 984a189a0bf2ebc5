"""The servers of one client, and the state that its calls share. Blocking and asyncio clients use it alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from edge.client.inference import CallInfo, checked_timeout
from edge.client.refusals import Refusal
from edge.client.retries import Attempts, Budget, Retries
from edge.client.round_robin import RoundRobin
from edge.client.rpcs import Rpc
from edge.errors import Literally, UsageError

DEFAULT_URL: Final = "127.0.0.1:8001"


class ServerPool:
    """One server or several. Safe to share between threads.

    Args:
        url: ``host:port``, or several of them.
        timeout_seconds: time limit of calls that have none of their own.
        retries: limits of the retries.
        watch: called with the index of a server whose connection was lost. It must see to it that
            ``round_robin.connected`` is called once the connection is back; it may be called again before that.
        tls: whether connections use TLS, for error messages.

    Attributes:
        urls: addresses of the servers.
        round_robin: of the servers.

    Raises:
        UsageError: there is no server, a server is given twice, or the time limit is out of range.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        timeout_seconds: float,
        retries: Retries,
        watch: Callable[[int], None],
        *,
        tls: bool = False,
    ) -> None:
        self.urls = (url,) if isinstance(url, str) else tuple(url)
        if not self.urls or not all(self.urls) or len(set(self.urls)) < len(self.urls):
            fix = "Name each server once."
            raise UsageError("url", given=list(self.urls), expected="one server, or different ones", fix=fix)
        self.round_robin = RoundRobin(len(self.urls))
        self._timeout = checked_timeout(timeout_seconds)
        self._retries = retries
        self._budget = Budget(retries)
        self._watch = watch
        self._tls = tls
        self._process_id = os.getpid()
        self._closed = False

    def call(self, rpc: Rpc[Any]) -> Attempts:
        """Begin a call.

        Raises:
            UsageError: the client is closed or forked, the server is unknown or ambiguous, or the time limit is out of
                range.
        """
        if rpc.changes_server and not rpc.server and len(self.urls) > 1:
            given, fix = (
                Literally(f"{len(self.urls)} servers"),
                "Name it with server=; one server is changed at a time.",
            )
            raise UsageError(f"server for {rpc.subject}", given=given, expected="one of them", fix=fix)
        limit = self._timeout if rpc.timeout_seconds is None else rpc.timeout_seconds
        return self._attempts(rpc.repeatable, limit, rpc.server)

    def stream(self, timeout_seconds: float | None, server: str) -> Attempts:
        """Begin a stream, which is sent once and may have no time limit.

        Raises:
            UsageError: as :meth:`call`.
        """
        return self._attempts(False, timeout_seconds, server)

    def _attempts(self, repeatable: bool, timeout_seconds: float | None, server: str) -> Attempts:
        self.check()
        if server and server not in self.urls:
            fix = "Leave it out to use any of them."
            raise UsageError("server", given=server, expected=f"one of {', '.join(self.urls)}", fix=fix)
        return Attempts(
            self.round_robin,
            self._retries,
            self._budget,
            repeatable=repeatable,
            timeout_seconds=None if timeout_seconds is None else checked_timeout(timeout_seconds),
            server=self.urls.index(server) if server else None,
        )

    def answered(self, attempts: Attempts, started_ns: int) -> CallInfo:
        """Record an answer that has just arrived; ``started_ns`` is when its attempt began."""
        attempts.answered()
        round_trip_ns = time.perf_counter_ns() - started_ns
        return CallInfo(server=self.urls[attempts.server], attempts=attempts.count, round_trip_ns=round_trip_ns)

    def refused(self, attempts: Attempts, refusal: Refusal, subject: str) -> float:
        """Record a failed attempt.

        Returns:
            Seconds to wait before the next attempt.

        Raises:
            ServerError: there is no further attempt.
        """
        server, count = attempts.server, attempts.count
        lost = self.round_robin.refused(server, refusal, time.monotonic())
        if lost and len(self.urls) > 1 and not self._closed:
            self._watch(server)
        pause = attempts.refused(refusal)
        if pause is None:
            raise refusal.error(subject, self.urls[server], count, tls=self._tls)
        return pause

    def check(self) -> None:
        """Check that the client can be used.

        Raises:
            UsageError: it is closed, or this process is a fork of the one that made it. gRPC's threads do not survive a
                fork, and a call would wait for them for ever.
        """
        if self._closed:
            raise UsageError(
                "the client", given=Literally("a call after close()"), expected="none", fix="Make a new client."
            )
        if os.getpid() != self._process_id:
            given = Literally(f"a call in process {os.getpid()}, a fork of {self._process_id}")
            fix = "Make a client in each process, after the fork."
            raise UsageError("the client", given=given, expected="one of this process", fix=fix)

    def close(self) -> None:
        """Prevent further attempts."""
        self._closed = True
