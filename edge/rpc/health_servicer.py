"""``grpc.health.v1.Health``: the health of the server, of its services and of its models, each by its name.

The servicer that comes with gRPC forgets who else watches a name when one watcher goes, and its watchers hold a server
that wants to end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Tells what was set last, and those who watch each change. Runs on one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._draining = False
        # Set and replaced at each change.
        self._changed = asyncio.Event()

    def set(self, name: str, serving: bool) -> None:
        """Set the health of a service or model, unless the server drains; the empty name is the whole server."""
        if not self._draining:
            self._statuses[name] = SERVING if serving else NOT_SERVING
            self._wake()

    def drain(self) -> None:
        """Set all of them to NOT_SERVING for good, tell those who watch, and end their calls."""
        self._draining = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._wake()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Return the health of a name; one that was never set is NOT_FOUND."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service or model {request.service[:64]!r}")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Send the health of a name now, and whenever it changes; one that was never set may be so later."""
        last: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != last:
                last = status
                await context.write(health_pb2.HealthCheckResponse(status=status))
            if self._draining:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is going down")
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
