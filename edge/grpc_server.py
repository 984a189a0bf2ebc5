"""The gRPC endpoint: which services, on which port, health, reflection, drain."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from edge.errors import Literally, UsageError
from edge.pb.pool import POOL
from edge.servicers import INFERENCE, TELEMETRY, InferenceServicer, TelemetryServicer, handlers

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# Reflection describes what is in the pool, so the two services that are not ours have to be in it too.
for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
    POOL.AddSerializedFile(_file.serialized_pb)


class GrpcServer:
    """The gRPC endpoint. It must be made, used and closed inside one running event loop.

    Args:
        inference: answers the RPCs of inference.
        telemetry: those of telemetry.
        max_message_bytes: the largest request that is read.

    Attributes:
        port: where it listens, once :meth:`start` has returned.
    """

    def __init__(self, inference: InferenceServicer, telemetry: TelemetryServicer, max_message_bytes: int) -> None:
        self.port = 0
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # Without this a second server could silently share the port.
                ("grpc.so_reuseport", 0),
                # Clients may ping often: stock clients that keep connections alive must not be sent away.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        self._server.add_generic_rpc_handlers((handlers(INFERENCE, inference), handlers(TELEMETRY, telemetry)))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE, TELEMETRY, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, pool=POOL)

    async def start(self, host: str, port: int) -> None:
        """Listen, with every health status NOT_SERVING.

        Raises:
            UsageError: the port cannot be taken.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            fix = "Give another --grpc-port, or 0 for any free one."
            given = Literally(str(error).splitlines()[0])
            raise UsageError(f"--grpc-port {port}", given=given, expected=f"a free port on {host}", fix=fix) from None
        for name in ("", INFERENCE, TELEMETRY):
            await self.set_health(name, False)
        await self._server.start()

    async def set_health(self, name: str, serving: bool) -> None:
        """Set the health of a service or model; the empty name is the whole server."""
        await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def drain(self, grace_seconds: float) -> None:
        """Say NOT_SERVING, refuse new calls, let the accepted ones end, then close the port."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)
