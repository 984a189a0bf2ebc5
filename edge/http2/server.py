"""The gRPC endpoint on nghttp2: the listening socket, health and drain."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge.connections.listener import Listener
from edge.connections.quota import Quota, Share
from edge.health.health import Health
from edge.http2.connection import Http2Connection
from edge.http2.messages import Field, read_metadata
from edge.http2.rpc import Direct, Route
from edge.protocol import INFERENCE
from edge.rpc.limits import Limits
from edge.rpc.methods import FindMethod, Refused
from edge.rpc.servicers import Endpoint, InferenceServicer, TelemetryServicer
from edge.security.access import CALLER, Access
from edge.security.certificates import ServerCertificates
from edge.serving.statuses import Code

#: Between the first GOAWAY, which announces the shutdown, and the final one: calls already on their way still arrive.
_NOTICE_SECONDS = 0.1
_POLL_SECONDS = 0.01
#: The limit for sending the statuses of cancelled calls.
_FLUSH_SECONDS = 1.0


class Routes:
    """The methods of a server, ``direct`` by path. ``by_path`` says that one look-up for each path is enough."""

    def __init__(
        self, find: FindMethod, limits: Limits, by_path: bool, direct: Mapping[str, Direct] | None = None
    ) -> None:
        self._find, self._limits, self._by_path = find, limits, by_path
        self._direct = direct or {}
        self._routes: dict[str, Route] = {}

    def find(self, path: str, fields: Sequence[Field]) -> Route:
        """Return the route of a call with this path and these header fields.

        Raise a Refused if there is no such method, or the caller may not use it.
        """
        route = self._routes.get(path)
        if route is None:
            method = self._find(path, read_metadata(fields))
            if method is None:
                raise Refused(Code.UNIMPLEMENTED, "the server has no such method")
            proves = self._by_path or bool(CALLER.get())
            route = Route(method, self._limits.max_request_bytes(path), self._direct.get(path), proves)
            if self._by_path:
                self._routes[path] = route
        return route


class Http2Server(Endpoint):
    """The gRPC endpoint on nghttp2."""

    def __init__(
        self,
        inference: InferenceServicer,
        telemetry: TelemetryServicer,
        health: Health,
        limits: Limits,
        *,
        quota: Quota,
        access: Access | None = None,
        certificates: ServerCertificates | None = None,
    ) -> None:
        direct = Direct(inference.start_model_infer, inference.cancel_model_infer)
        super().__init__(inference, telemetry, health, limits, access)
        routes = Routes(self.find, limits, by_path=access is None, direct={f"/{INFERENCE}/ModelInfer": direct})
        context = certificates.follow(lambda now: now.http2) if certificates else None
        self._port = Port(routes, limits, quota, context)

    async def start(self, host: str, port: int, path: Path | None = None) -> None:
        """Listen, on the Unix socket ``path`` instead of the port if there is one. Only telemetry is SERVING at first.

        Raise a UsageError if the address cannot be taken.
        """
        self.port = await self._port.open(host, port, path)

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new calls, and close the port after the others end."""
        await self._port.drain(grace_seconds)


class Port:
    """A listening port. It is opened, used and drained inside one running event loop."""

    def __init__(self, routes: Routes, limits: Limits, quota: Quota, context: ssl.SSLContext | None = None) -> None:
        self._connections: set[Http2Connection] = set()

        def protocol(share: Share) -> Http2Connection:
            return Http2Connection(routes.find, limits, self._connections, share)

        self._listener = Listener("grpc", quota, limits.max_connections, protocol, context, limits.handshake_seconds)

    async def open(self, host: str, port: int, path: Path | None = None) -> int:
        """Listen, as :meth:`Listener.open`."""
        return await self._listener.open(host, port, path)

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new calls, cancel the accepted ones that do not end within the grace, then close every connection."""
        limit = time.monotonic() + grace_seconds
        await self._listener.close()
        for connection in list(self._connections):
            connection.refuse_soon()
        if self._connections:
            await asyncio.sleep(min(_NOTICE_SECONDS, grace_seconds))
        for connection in list(self._connections):
            connection.refuse()
        while not all(connection.idle for connection in self._connections) and time.monotonic() < limit:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.gather(*(connection.stop() for connection in list(self._connections)))
        limit = time.monotonic() + _FLUSH_SECONDS
        while self._connections and time.monotonic() < limit:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self._connections):
            connection.abort()
