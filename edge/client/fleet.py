"""The servers that one client asks, and what all its calls share; blocking or asyncio is no matter here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from edge.client.inference import Trip, checked_timeout
from edge.client.refusals import Refusal
from edge.client.retries import Attempts, Budget, Retries
from edge.client.rotation import Rotation
from edge.errors import Literally, UsageError

DEFAULT_URL: Final = "127.0.0.1:8001"


class Fleet:
    """One server or several. Safe to share between threads.

    Args:
        url: ``host:port``, or several of them.
        timeout_seconds: of calls that name no time of their own.
        retries: how often something is sent again.
        watch: is called with the index of a server whose connection was lost, and has to see to it that
            ``rotation.connected`` is called once that stands again. It may be called again in the meantime.

    Attributes:
        urls: of the servers.
        rotation: of the servers.

    Raises:
        UsageError: there is no server, or one twice; or the time is none.
    """

    def __init__(
        self, url: str | Sequence[str], timeout_seconds: float, retries: Retries, watch: Callable[[int], None]
    ) -> None:
        self.urls = (url,) if isinstance(url, str) else tuple(url)
        if not self.urls or not all(self.urls) or len(set(self.urls)) < len(self.urls):
            fix = "Name each server once."
            raise UsageError("url", given=list(self.urls), expected="one server, or different ones", fix=fix)
        self.rotation = Rotation(len(self.urls))
        self._timeout = checked_timeout(timeout_seconds)
        self._retries = retries
        self._budget = Budget(retries)
        self._watch = watch
        self._process_id = os.getpid()
        self._closed = False

    def call(self, repeatable: bool, timeout_seconds: float | None, server: str) -> Attempts:
        """Begin a call.

        Args:
            repeatable: whether it may be sent twice.
            timeout_seconds: for all of it; None is the default.
            server: the only one to ask; empty for the next in turn.

        Raises:
            UsageError: the client cannot be used, there is no such server, or the time is none.
        """
        return self._attempts(repeatable, self._timeout if timeout_seconds is None else timeout_seconds, server)

    def stream(self, timeout_seconds: float | None, server: str) -> Attempts:
        """Begin a stream, which is sent once, and without a time may last for ever; as :meth:`call`."""
        return self._attempts(False, timeout_seconds, server)

    def _attempts(self, repeatable: bool, timeout_seconds: float | None, server: str) -> Attempts:
        self.check()
        if server and server not in self.urls:
            fix = "Leave it out for any of them."
            raise UsageError("server", given=server, expected=f"one of {', '.join(self.urls)}", fix=fix)
        return Attempts(
            self.rotation,
            self._retries,
            self._budget,
            repeatable=repeatable,
            timeout_seconds=None if timeout_seconds is None else checked_timeout(timeout_seconds),
            server=self.urls.index(server) if server else None,
        )

    def the_one(self, server: str, what: str) -> str:
        """Return the server that a change is meant for.

        Raises:
            UsageError: it could be meant for several.
        """
        if server or len(self.urls) == 1:
            return server
        fix = "Name it with server=; a change is made at one server at a time."
        raise UsageError(what, given=Literally(f"{len(self.urls)} servers"), expected="one of them", fix=fix)

    def trip(self, attempts: Attempts, started_ns: int) -> Trip:
        """Note an answer that has just come, and tell how it came."""
        attempts.answered()
        round_trip_ns = time.perf_counter_ns() - started_ns
        return Trip(server=self.urls[attempts.server], attempts=attempts.count, round_trip_ns=round_trip_ns)

    def refused(self, attempts: Attempts, refusal: Refusal, subject: str) -> float:
        """Note an end without an answer.

        Returns:
            Seconds to wait before the next attempt.

        Raises:
            ServerError: there shall be none.
        """
        server, count = attempts.server, attempts.count
        lost = self.rotation.refused(server, refusal, time.monotonic())
        if lost and len(self.urls) > 1 and not self._closed:
            self._watch(server)
        pause = attempts.refused(refusal)
        if pause is None:
            raise refusal.error(subject, self.urls[server], count)
        return pause

    def check(self) -> None:
        """Check that the client can be used, before each attempt.

        Raises:
            UsageError: it is closed, or was made before this process was forked. gRPC's threads are not forked along,
                and a call would wait for them for ever.
        """
        if self._closed:
            raise UsageError("the client", given=Literally("a call after close()"), expected="none", fix="Make one.")
        if os.getpid() != self._process_id:
            given = Literally(f"a call in process {os.getpid()}, a fork of {self._process_id}")
            fix = "Make a client in each process, after the fork."
            raise UsageError("the client", given=given, expected="one of this process", fix=fix)

    def close(self) -> None:
        """Let no further attempt begin."""
        self._closed = True
