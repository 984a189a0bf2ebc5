"""The gRPC endpoint on nghttp2: which services, on which port, health, reflection, drain."""

from __future__ import annotations

from edge.http2.port import Port
from edge.http2.routes import Direct, Routes
from edge.rpc.endpoint import Endpoint, port_is_taken
from edge.rpc.inference_servicer import InferenceServicer
from edge.rpc.limits import Limits
from edge.rpc.telemetry_servicer import TelemetryServicer
from edge.security.access import Access
from edge.security.credentials import ServerCertificates


class Http2Server(Endpoint):
    """The gRPC endpoint on nghttp2.

    Args:
        inference: answers the RPCs of inference.
        telemetry: those of telemetry.
        limits: what a client may take.
        access: who may call what; None lets everyone call everything.
        certificates: for TLS; None serves without it.

    Attributes:
        port: where it listens, once :meth:`start` has returned.
    """

    def __init__(
        self,
        inference: InferenceServicer,
        telemetry: TelemetryServicer,
        limits: Limits,
        *,
        access: Access | None = None,
        certificates: ServerCertificates | None = None,
    ) -> None:
        direct = Direct(inference.start_model_infer, inference.cancel_model_infer)
        routes = Routes(by_path=access is None, direct={inference.ModelInfer: direct})
        super().__init__(routes, inference, telemetry, access)
        context = certificates.follow(lambda now: now.http2) if certificates else None
        self._port = Port(routes, limits, context)

    async def start(self, host: str, port: int) -> None:
        """Listen, with NOT_SERVING as the health of all but telemetry, which answers at once.

        Raises:
            UsageError: the port cannot be taken.
        """
        try:
            self.port = await self._port.open(host, port)
        except OSError as error:
            raise port_is_taken(host, port, str(error)) from None

    async def drain(self, grace_seconds: float) -> None:
        """Say NOT_SERVING, end the calls that only watch, refuse new ones, let the others end, then close the port."""
        self._dismiss()
        await self._port.drain(grace_seconds)
