"""Services, authorization and health of the gRPC endpoint, common to all transports."""

from __future__ import annotations

from collections.abc import Iterable

from grpc_reflection.v1alpha import reflection_pb2

from edge.errors import PermissionDenied, Unauthenticated
from edge.health.health import Health
from edge.pb.pool import POOL
from edge.protocol import HEALTH, INFERENCE, REFLECTION, TELEMETRY
from edge.rpc.inference_servicer import InferenceServicer
from edge.rpc.limits import Limits
from edge.rpc.methods import Abort, Method, authorization, methods_of, refuse, status_of
from edge.rpc.parsing import Refused
from edge.rpc.servicers import HealthServicer, ReflectionServicer, TelemetryServicer
from edge.security.access import CALLER, Access


class Endpoint:
    """All services. Without ``access``, every caller may do everything.

    ``packed`` says that the transport leaves messages compressed; ``abort`` ends calls.
    """

    def __init__(
        self,
        inference: InferenceServicer,
        telemetry: TelemetryServicer,
        health: Health,
        limits: Limits,
        access: Access | None,
        *,
        packed: bool = False,
        abort: Abort = refuse,
    ) -> None:
        self.port = 0  # until the server listens
        self._access = access
        servicers = {INFERENCE: inference, TELEMETRY: telemetry, HEALTH: HealthServicer(health)}
        self.methods: dict[str, Method] = {}
        for name, servicer in servicers.items():
            self.methods |= methods_of(POOL.FindServiceByName(name), servicer, limits, packed, abort)
        reflecting = ReflectionServicer((*servicers, REFLECTION))
        # Its servicer answers with the classes of protobuf's default pool.
        (described,) = reflection_pb2.DESCRIPTOR.services_by_name.values()
        self.methods |= methods_of(described, reflecting, limits, packed, abort)

    def find(self, path: str, metadata: Iterable[tuple[str, str | bytes]]) -> Method | None:
        """Return the method of a call, and name its caller, before its message is read; None for an unknown one.

        Raise ``Refused`` if the caller may not use it.
        """
        method = self.methods.get(path)
        if method and self._access:
            try:
                CALLER.set(self._access.authorize(authorization(metadata), path))
            except (Unauthenticated, PermissionDenied) as error:
                raise Refused(*status_of(error, path)) from None
        return method
