"""The gRPC endpoint on grpcio."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from edge.connections.listener import port_is_taken
from edge.connections.socket_file import SocketFile
from edge.health.health import Health
from edge.rpc.limits import Limits
from edge.rpc.methods import FindMethod, Method, Refused, Status
from edge.rpc.servicers import Endpoint, InferenceServicer, TelemetryServicer
from edge.security.access import Access
from edge.security.certificates import Certificates, ServerCertificates

#: Makes a handler, by whether the client streams and whether the server does.
_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class GrpcServer(Endpoint):
    """The gRPC endpoint. It is created, used and drained inside one running event loop."""

    def __init__(
        self,
        inference: InferenceServicer,
        telemetry: TelemetryServicer,
        health: Health,
        limits: Limits,
        *,
        access: Access | None = None,
        certificates: ServerCertificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._file: SocketFile | None = None
        self._server = grpc.aio.server(options=limits.options(), maximum_concurrent_rpcs=limits.max_calls)
        super().__init__(inference, telemetry, health, limits, access, packed=True, abort=_abort)
        handlers = generic_handlers(self.methods)
        if access:
            handlers = [_Authorizing(each, self.find) for each in handlers]
        self._server.add_generic_rpc_handlers(handlers)

    async def start(self, host: str, port: int, path: Path | None = None) -> None:
        """Listen, on the Unix socket ``path`` instead of the port if there is one. Only telemetry is SERVING at first.

        Raise a UsageError if the address cannot be taken.
        """
        if path:
            self._file = SocketFile("--grpc-socket", path)
            self._file.make(lambda absolute: self._bind(f"unix:{quote(os.fsencode(absolute))}"))
        else:
            try:
                self.port = self._bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            except RuntimeError as error:
                raise port_is_taken("--grpc-port", host, port, str(error)) from None
        await self._server.start()

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new calls, and close the port after the others end."""
        await self._server.stop(grace_seconds)
        if self._file:
            self._file.remove()

    def _bind(self, address: str) -> int:
        if self._certificates is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, credentials(self._certificates)))


class _Authorizing(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Authorizes a call before its message is read, without the additional coroutine of an interceptor."""

    def __init__(self, handler: grpc.GenericRpcHandler, find: FindMethod) -> None:
        self._handler, self._find = handler, find

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = self._handler.service(handler_call_details)
        if handler is None:  # a method of another service
            return None
        try:
            self._find(handler_call_details.method, handler_call_details.invocation_metadata)
        except Refused as refused:
            status = refused.status
        else:
            return handler

        async def refuse(requests: object, context: grpc.aio.ServicerContext[object, object]) -> None:
            await _abort(context, status)

        # For any kind of method: handlers of the other kinds would read the message first.
        return grpc.stream_stream_rpc_method_handler(refuse)


def generic_handlers(methods: dict[str, Method]) -> list[grpc.GenericRpcHandler]:
    """Return the handler of each service, which finds methods without code of ours."""
    services: defaultdict[str, dict[str, grpc.RpcMethodHandler]] = defaultdict(dict)
    for path, method in methods.items():
        service, _, name = path[1:].partition("/")
        make = _MAKERS[method.request_streaming, method.response_streaming]
        services[service][name] = make(
            method.answer, request_deserializer=method.parse, response_serializer=method.serialize
        )
    return [grpc.method_handlers_generic_handler(service, handlers) for service, handlers in services.items()]


async def _abort(context: grpc.aio.ServicerContext[Any, Any], status: Status) -> None:
    await context.abort(grpc.StatusCode[status.code.name], status.details, status.trailers)


def credentials(certificates: ServerCertificates) -> grpc.ServerCredentials:
    """Return credentials that give each new connection the current certificates."""
    shown = certificates.value

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        previous, shown = shown, certificates.value
        return None if shown is previous else _configuration(shown)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), changed, shown.client_ca is not None)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)
