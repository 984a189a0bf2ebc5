"""The RPCs as gRPC sees them: each asks what answers it, and ends with the status of its error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from edge import errors
from edge.errors import RequestError
from edge.instruments.traces import carry
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.security.access import CALLER, Access
from edge.security.rate import client_of
from edge.security.scopes import INFER_STREAM, TELEMETRY_WATCH
from edge.serving.calls import Calls
from edge.serving.extensions import Extensions
from edge.serving.service import InferenceService
from edge.serving.statuses import STATUSES
from edge.serving.streams import Draining, Streams, Unparseable
from edge.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)

INFERENCE = "inference.GRPCInferenceService"
TELEMETRY = "fewheads.telemetry.v1.Telemetry"

#: Errors to the status codes of gRPC.
STATUS_CODES: dict[type[RequestError], grpc.StatusCode] = {
    kind: getattr(grpc.StatusCode, status.grpc) for kind, status in STATUSES.items()
}

UNPARSEABLE = "the message is not the protobuf of this method"
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
            return await context.abort(grpc.StatusCode.INTERNAL, UNPARSEABLE)
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
    """``inference.GRPCInferenceService``: each method asks the service and passes the answer on.

    Args:
        service: what needs no model to compute.
        calls: answers single requests.
        streams: answers streams.
        extensions: answers Triton's extensions.
        access: asked again for each request of a stream; None lets everyone call everything.
    """

    def __init__(
        self,
        service: InferenceService,
        calls: Calls,
        streams: Streams,
        extensions: Extensions,
        access: Access | None = None,
    ) -> None:
        self._access = access
        self._service = service
        self._calls = calls
        self._streams = streams
        self._extensions = extensions

    def _introduce(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Note who asks and, where requests are traced, as part of which trace."""
        _name_caller(context)
        if self._service.traced:
            carry(context.invocation_metadata())

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
        await self._extensions.list_unloaded(request.repository_name)
        return self._service.repository_index(request)

    def infer_at_once(
        self, request: pb.ModelInferRequest | None, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ModelInferResponse | None:
        """Answer what ModelInfer need not wait for, as :meth:`edge.serving.calls.Calls.infer_at_once`."""
        return None if request is None else self._calls.infer_at_once(request, _deadline(context))

    @_answer
    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ModelInferResponse:
        self._introduce(context)
        return await self._calls.infer(request, _deadline(context))

    @_answer
    async def ModelStreamInfer(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._introduce(context)

        async def read() -> pb.ModelInferRequest | None:
            request = await context.read()
            if request is None:
                raise Unparseable
            _ask_again(self._access, INFER_STREAM, context)
            return None if request is grpc.aio.EOF else request

        try:
            await self._streams.answer(read, context.write, _deadline(context))
            return
        except Unparseable:
            code, details = grpc.StatusCode.INTERNAL, UNPARSEABLE
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


def _name_caller(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Note who asks, by the address, where no token has told it."""
    if not CALLER.get():
        CALLER.set(_client(context.peer()))


@lru_cache
def _client(peer: str) -> str:
    """Return who asks, from the address as gRPC writes it."""
    _, _, address = peer.partition(":")
    return client_of(unquote(address).rpartition(":")[0].strip("[]"))


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the header that holds a caller's token; None if there is none."""
    for name, value in metadata:
        if name == "authorization":
            return value if isinstance(value, str) else ""
    return None


def _ask_again(access: Access | None, rpc: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Check that a call that goes on may do so, for its token may have gone meanwhile.

    Raises:
        RequestError: as :meth:`edge.security.access.Access.authorize`.
    """
    if access:
        access.authorize(authorization(context.invocation_metadata()), rpc)


class TelemetryServicer:
    """``fewheads.telemetry.v1.Telemetry``.

    Args:
        telemetry: takes the readings.
        access: asked again for each reading of a call that goes on; None lets everyone read.
    """

    def __init__(self, telemetry: Telemetry, access: Access | None = None) -> None:
        self._access = access
        self._telemetry = telemetry
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """End the calls that watch: they would go on for as long as the server lets them."""
        self._draining.set()

    @_answer
    async def Get(self, request: telemetry_pb2.GetRequest, context: Any) -> telemetry_pb2.Reading:
        return await asyncio.to_thread(self._telemetry.reading)

    @_answer
    async def Watch(self, request: telemetry_pb2.WatchRequest, context: Any) -> None:
        interval_ms = request.interval_ms or _DEFAULT_WATCH_MS
        if interval_ms < _MIN_WATCH_MS:
            expected, fix = f"at least {_MIN_WATCH_MS}", "0 means once a second."
            raise errors.InvalidRequest("interval_ms", given=interval_ms, expected=expected, fix=fix)
        while True:
            await context.write(await asyncio.to_thread(self._telemetry.reading))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._draining.wait(), interval_ms / 1000)
                await context.abort(grpc.StatusCode.UNAVAILABLE, _DRAINING)
            _ask_again(self._access, TELEMETRY_WATCH, context)
