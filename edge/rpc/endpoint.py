"""Services, authorization and health of the gRPC endpoint, common to all transports."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from edge.errors import PermissionDenied, Unauthenticated
from edge.pb.pool import POOL
from edge.protocol import INFERENCE, TELEMETRY
from edge.rpc.health_servicer import HealthServicer
from edge.rpc.inference_servicer import InferenceServicer
from edge.rpc.limits import Limits
from edge.rpc.methods import authorization, handlers, status_of
from edge.rpc.telemetry_servicer import TelemetryServicer
from edge.security.access import CALLER, Access


class Endpoint:
    """All services and their health. Without ``access``, every caller may do everything.

    Args:
        server: a ``grpc.aio.Server``, or an object that collects handlers like one.
        packed: whether it leaves messages compressed.
    """

    def __init__(
        self,
        server: Any,
        inference: InferenceServicer,
        telemetry: TelemetryServicer,
        limits: Limits,
        access: Access | None,
        *,
        packed: bool = False,
    ) -> None:
        self.port = 0  # until the server listens
        self._telemetry = telemetry
        self._health = HealthServicer()
        self.set_health = self._health.set
        for name in ("", INFERENCE, TELEMETRY):  # only telemetry serves from the start
            self.set_health(name, name == TELEMETRY)
        servicers = {INFERENCE: inference, TELEMETRY: telemetry, health.SERVICE_NAME: self._health}
        services = _Services(handlers(name, servicer, limits, packed) for name, servicer in servicers.items())
        names = (*servicers, reflection.SERVICE_NAME)
        reflecting = reflection.aio.ReflectionServicer(names, pool=POOL)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflecting, services)
        server.add_generic_rpc_handlers([_Authorizing(each, access) for each in services] if access else services)

    def _end_watches(self) -> None:
        """Set the health to NOT_SERVING, and end calls that only watch."""
        self._health.drain()
        self._telemetry.drain()


class _Services(list[grpc.GenericRpcHandler]):
    """Handlers, to which generated code adds its own as to a ``grpc.aio.Server``."""

    add_generic_rpc_handlers = list.extend

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Do nothing, like grpc.aio; generated code calls this in addition."""


class _Authorizing(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Authorizes a call before its message is read, without the additional coroutine of an interceptor."""

    def __init__(self, handler: grpc.GenericRpcHandler, access: Access) -> None:
        self._handler = handler
        self._access = access

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        found = self._handler.service(handler_call_details)
        if found is None:  # a method of another service
            return None
        header = authorization(handler_call_details.invocation_metadata)
        try:
            CALLER.set(self._access.authorize(header, handler_call_details.method))
        except (Unauthenticated, PermissionDenied) as error:
            status = status_of(error, handler_call_details.method)
        else:
            return found

        async def refuse(requests: object, context: grpc.aio.ServicerContext[object, object]) -> None:
            await context.abort(*status)

        # For any kind of method: handlers of the other kinds would read the message first.
        return grpc.stream_stream_rpc_method_handler(refuse)
