"""The gRPC endpoint on grpcio."""

from __future__ import annotations

import grpc

from edge.connections.listener import port_is_taken
from edge.rpc.endpoint import Endpoint
from edge.rpc.inference_servicer import InferenceServicer
from edge.rpc.limits import Limits
from edge.rpc.telemetry_servicer import TelemetryServicer
from edge.security.access import Access
from edge.security.credentials import ServerCertificates


class GrpcServer(Endpoint):
    """The gRPC endpoint. It is created, used and drained inside one running event loop."""

    def __init__(
        self,
        inference: InferenceServicer,
        telemetry: TelemetryServicer,
        limits: Limits,
        *,
        access: Access | None = None,
        certificates: ServerCertificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._server = grpc.aio.server(options=limits.options(), maximum_concurrent_rpcs=limits.max_calls)
        super().__init__(self._server, inference, telemetry, limits, access, packed=True)

    async def start(self, host: str, port: int) -> None:
        """Listen. Only telemetry is SERVING at first."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._certificates is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._certificates.grpc())
        except RuntimeError as error:
            raise port_is_taken("--grpc-port", host, port, str(error)) from None
        await self._server.start()

    async def drain(self, grace_seconds: float) -> None:
        """Report NOT_SERVING, end watches, refuse new calls, and close the port after the others end."""
        self._end_watches()
        await self._server.stop(grace_seconds)
