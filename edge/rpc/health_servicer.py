"""``grpc.health.v1.Health``: the health of the server, of its services and of its models, each by its name.

It replaces gRPC's own servicer, which forgets the other watchers of a name when one leaves, and whose watchers block
the shutdown of a server.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from edge.health.health import Health
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

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(self, request: Any, context: Any) -> Any:
        """Return the health of a name; an unknown name is NOT_FOUND."""
        status = self._status(request.service)
        if status == _STATUS.SERVICE_UNKNOWN:
            raise Refused(Code.NOT_FOUND, f"no service or model {request.service[:64]!r}")
        return _STATUS(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        """Send the health of a name now and at each change; an unknown name may become known."""
        last: int | None = None
        while True:
            changed, status = self._health.changed, self._status(request.service)
            if status != last:
                last = status
                await context.write(_STATUS(status=status))
            if self._health.draining.is_set():
                raise Refused(Code.UNAVAILABLE, "the server is going down")
            await changed.wait()

    def _status(self, name: str) -> int:
        serving: bool | None = self._health.serving.get(name)
        status: int = {True: _STATUS.SERVING, False: _STATUS.NOT_SERVING, None: _STATUS.SERVICE_UNKNOWN}[serving]
        return status
