"""gRPC around the service: servicers, status codes, health, reflection, drain. No logic of inference lives here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from edge import errors
from edge.device import expired
from edge.errors import Literally, RequestError, UsageError
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.service import InferenceService
from edge.telemetry import Telemetry

log = logging.getLogger(__name__)

INFERENCE = "inference.GRPCInferenceService"
TELEMETRY = "fewheads.telemetry.v1.Telemetry"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

#: The one place where errors become status codes.
STATUS_CODES: dict[type[RequestError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.RunnerError: grpc.StatusCode.INTERNAL,
}

_UNPARSEABLE = "the message is not the protobuf of this method"
_MIN_WATCH_MS = 100
_DEFAULT_WATCH_MS = 1000

# Reflection describes what is in the pool, so the two services that are not ours have to be in it too.
for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
    POOL.AddSerializedFile(_file.serialized_pb)

R = TypeVar("R")
Handler = Callable[[Any, Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[R]]


def _answer(method: Handler[R]) -> Handler[R]:
    """End a call with the status of its error; an unforeseen one is logged and shows the client nothing."""

    @wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request is None:
            return await context.abort(grpc.StatusCode.INTERNAL, _UNPARSEABLE)
        try:
            return await method(self, request, context)
        except RequestError as error:
            return await context.abort(STATUS_CODES[type(error)], str(error))
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("%s failed", method.__name__)
            return await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log tells more")

    return handler


def _handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """Register a servicer's methods as its ``.proto`` describes them.

    The generated registration would let grpc.aio answer an unparseable message with UNKNOWN and an exception's text.
    """
    handlers = {}
    for method in POOL.FindServiceByName(service).methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=_parser(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, handlers)


def _parser(message: type[Message]) -> Callable[[bytes], Message | None]:
    def parse(data: bytes) -> Message | None:
        try:
            return message.FromString(data)
        except DecodeError:
            return None  # _answer turns it into a status; raising here would not

    return parse


class InferenceServicer:
    """``inference.GRPCInferenceService``: each method asks the service and passes the answer on."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    @_answer
    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @_answer
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.server_ready())

    @_answer
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._service.model_ready(request))

    @_answer
    async def ServerMetadata(self, request: Any, context: Any) -> pb.ServerMetadataResponse:
        return self._service.server_metadata()

    @_answer
    async def ModelMetadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:
        return self._service.model_metadata(request)

    @_answer
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        return self._service.model_config(request)

    @_answer
    async def ModelStatistics(self, request: Any, context: Any) -> pb.ModelStatisticsResponse:
        return self._service.model_statistics(request)

    @_answer
    async def RepositoryIndex(self, request: Any, context: Any) -> pb.RepositoryIndexResponse:
        return self._service.repository_index(request)

    @_answer
    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ModelInferResponse:
        remaining = context.time_remaining()
        call = self._service.start(request, None if remaining is None else time.monotonic() + remaining)
        try:
            waiting = asyncio.wrap_future(call.future)
            if call.parameters.timeout_seconds is None:  # the client's own deadline cancels this coroutine
                answer = await waiting
            else:
                answer = await asyncio.wait_for(waiting, call.parameters.timeout_seconds)
            return self._service.finish(call, answer)
        except asyncio.CancelledError:
            self._service.failed(call, "Cancelled")
            raise
        except asyncio.TimeoutError:
            self._service.failed(call, "DeadlineExceeded")
            raise expired(time.perf_counter_ns() - call.started_ns) from None
        except Exception as error:
            self._service.failed(call, type(error).__name__)
            raise


class TelemetryServicer:
    """``fewheads.telemetry.v1.Telemetry``."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    @_answer
    async def Get(self, request: telemetry_pb2.GetRequest, context: Any) -> telemetry_pb2.Reading:
        return self._telemetry.reading()

    async def Watch(
        self, request: telemetry_pb2.WatchRequest | None, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[telemetry_pb2.Reading]:
        if request is None:
            await context.abort(grpc.StatusCode.INTERNAL, _UNPARSEABLE)
            return
        interval_ms = request.interval_ms or _DEFAULT_WATCH_MS
        if interval_ms < _MIN_WATCH_MS:
            error = errors.InvalidRequest(
                "interval_ms", given=interval_ms, expected=f"at least {_MIN_WATCH_MS}", fix="0 means once a second."
            )
            await context.abort(STATUS_CODES[type(error)], str(error))
        while True:
            yield self._telemetry.reading()
            await asyncio.sleep(interval_ms / 1000)


class GrpcServer:
    """The gRPC endpoint. It must be made, used and closed inside one running event loop.

    Args:
        service: the inference service.
        telemetry: the readings.
        max_message_bytes: the largest request that is read.

    Attributes:
        port: where it listens, once :meth:`start` has returned.
    """

    def __init__(self, service: InferenceService, telemetry: Telemetry, max_message_bytes: int) -> None:
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
        self._server.add_generic_rpc_handlers(
            (_handlers(INFERENCE, InferenceServicer(service)), _handlers(TELEMETRY, TelemetryServicer(telemetry)))
        )
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
