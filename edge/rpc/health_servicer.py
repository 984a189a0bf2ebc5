"""``grpc.health.v1.Health``: the health of the server, of its services and of its models, each by its name.

It replaces gRPC's own servicer, which forgets the other watchers of a name when one leaves, and whose watchers block
the shutdown of a server.
"""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from edge.pb.pool import POOL
from edge.protocol import HEALTH
from edge.rpc.parsing import Refused
from edge.serving.statuses import Code

# These two services register themselves in protobuf's default pool. Ours has what reflection describes.
for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
    POOL.AddSerializedFile(_file.serialized_pb)
_STATUS: Any = GetMessageClass(POOL.FindServiceByName(HEALTH).methods_by_name["Check"].output_type)


class HealthServicer:
    """Reports health and its changes. It belongs to one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._draining = False
        self._changed = asyncio.Event()  # set and replaced at each change

    def set(self, name: str, serving: bool) -> None:
        """Set the health of a service or model, unless the server drains; the empty name is the whole server."""
        if not self._draining:
            self._statuses[name] = _STATUS.SERVING if serving else _STATUS.NOT_SERVING
            self._wake()

    def drain(self) -> None:
        """Set everything to NOT_SERVING for good, report that to the watchers, and end their calls."""
        self._draining = True
        self._statuses = dict.fromkeys(self._statuses, _STATUS.NOT_SERVING)
        self._wake()

    async def Check(self, request: Any, context: Any) -> Any:
        """Return the health of a name; an unknown name is NOT_FOUND."""
        if request.service not in self._statuses:
            raise Refused(Code.NOT_FOUND, f"no service or model {request.service[:64]!r}")
        return _STATUS(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: Any) -> None:
        """Send the health of a name now and at each change; an unknown name may become known."""
        last: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _STATUS.SERVICE_UNKNOWN)
            if status != last:
                last = status
                await context.write(_STATUS(status=status))
            if self._draining:
                raise Refused(Code.UNAVAILABLE, "the server is going down")
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
