"""The RPCs as gRPC sees them: each asks what answers it, and ends with the status of its error."""

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

from edge import errors
from edge.calls import Calls
from edge.errors import RequestError
from edge.extensions import Extensions
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.service import InferenceService
from edge.streams import Draining, Streams, Unparseable
from edge.telemetry import Telemetry

log = logging.getLogger(__name__)

INFERENCE = "inference.GRPCInferenceService"
TELEMETRY = "fewheads.telemetry.v1.Telemetry"

#: The one place where errors become status codes.
STATUS_CODES: dict[type[RequestError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyThere: grpc.StatusCode.ALREADY_EXISTS,
    errors.LoadFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.RunnerError: grpc.StatusCode.INTERNAL,
}

_UNPARSEABLE = "the message is not the protobuf of this method"
_DRAINING = "the server is going down and takes no further request"
#: Whether the client streams and whether the server does, to what makes a handler of that kind.
_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_MIN_WATCH_MS = 100
_DEFAULT_WATCH_MS = 1000

R = TypeVar("R")
Handler = Callable[[Any, Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[R]]


def _answer(method: Handler[R]) -> Handler[R]:
    """End a call with the status of its error; an unforeseen one is logged and shows the client nothing."""

    @wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request is None:
            return await context.abort(grpc.StatusCode.INTERNAL, _UNPARSEABLE)
        trailer: tuple[tuple[str, str], ...] = ()
        try:
            return await method(self, request, context)
        except RequestError as error:
            code, details = STATUS_CODES[type(error)], str(error)
            if isinstance(error, errors.Overloaded) and error.retry_after_ms:
                trailer = (("retry-after-ms", str(error.retry_after_ms)),)
            log.debug("%s: %s", method.__name__, error)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception:
            code, details = grpc.StatusCode.INTERNAL, errors.INTERNAL
            log.exception("%s failed", method.__name__)
        # gRPC ties the exception that aborts a call into a circle with the call. Nothing of the request may hang on it,
        # neither here nor as the context of that exception, or it would stay until Python's collector comes by.
        del request
        return await context.abort(code, details, trailer)

    return handler


def handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """Register a servicer's methods as its ``.proto`` describes them.

    The generated registration would let grpc.aio answer an unparseable message with UNKNOWN and an exception's text.
    """
    return grpc.method_handlers_generic_handler(
        service,
        {
            method.name: _MAKERS[method.client_streaming, method.server_streaming](
                getattr(servicer, method.name),
                request_deserializer=_parser(GetMessageClass(method.input_type)),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in POOL.FindServiceByName(service).methods
        },
    )


def _parser(message: type[Message]) -> Callable[[bytes], Message | None]:
    def parse(data: bytes) -> Message | None:
        try:
            return message.FromString(data)
        except DecodeError:
            return None  # _answer turns it into a status; raising here would not

    return parse


class InferenceServicer:
    """``inference.GRPCInferenceService``: each method asks the service and passes the answer on."""

    def __init__(self, service: InferenceService, calls: Calls, streams: Streams, extensions: Extensions) -> None:
        self._service = service
        self._calls = calls
        self._streams = streams
        self._extensions = extensions

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
        await self._extensions.list_unloaded()
        return self._service.repository_index(request)

    @_answer
    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ModelInferResponse:
        return await self._calls.infer(request, _deadline(context))

    async def ModelStreamInfer(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async def read() -> pb.ModelInferRequest | None:
            request = await context.read()
            if request is None:
                raise Unparseable
            return None if request is grpc.aio.EOF else request

        try:
            await self._streams.answer(read, context.write, _deadline(context))
            return
        except Unparseable:
            code, details = grpc.StatusCode.INTERNAL, _UNPARSEABLE
        except Draining:
            code, details = grpc.StatusCode.UNAVAILABLE, _DRAINING
        await context.abort(code, details)  # not in the block above, for the reason in _answer

    @_answer
    async def RepositoryModelLoad(self, request: Any, context: Any) -> pb.RepositoryModelLoadResponse:
        return await self._extensions.load_model(request)

    @_answer
    async def RepositoryModelUnload(self, request: Any, context: Any) -> pb.RepositoryModelUnloadResponse:
        return await self._extensions.unload_model(request)

    @_answer
    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> pb.SystemSharedMemoryStatusResponse:
        return self._extensions.shared_memory_status(request)

    @_answer
    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> pb.SystemSharedMemoryRegisterResponse:
        return self._extensions.register_shared_memory(request)

    @_answer
    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> pb.SystemSharedMemoryUnregisterResponse:
        return self._extensions.unregister_shared_memory(request)

    @_answer
    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> pb.CudaSharedMemoryStatusResponse:
        return pb.CudaSharedMemoryStatusResponse()

    @_answer
    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> pb.CudaSharedMemoryRegisterResponse:
        self._extensions.refuse_cuda_shared_memory()
        return pb.CudaSharedMemoryRegisterResponse()

    @_answer
    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> pb.CudaSharedMemoryUnregisterResponse:
        return pb.CudaSharedMemoryUnregisterResponse()

    @_answer
    async def TraceSetting(self, request: Any, context: Any) -> pb.TraceSettingResponse:
        return self._extensions.trace_setting(request)

    @_answer
    async def LogSettings(self, request: Any, context: Any) -> pb.LogSettingsResponse:
        return self._extensions.log_settings(request)


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Return the ``time.monotonic()`` seconds at which the client stops waiting; None if it waits for ever."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


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
