"""The services of gRPC: inference, whose methods call the parts of the server, health, telemetry and reflection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from inspect import isawaitable
from typing import Any, Final
from urllib.parse import unquote

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from edge.errors import InvalidRequest, PermissionDenied, Unauthenticated
from edge.health.health import Health
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.protocol import HEALTH, INFERENCE, REFLECTION, TELEMETRY
from edge.rpc.limits import Limits
from edge.rpc.methods import Abort, Method, Refused, Status, authorization, methods_of, read_from, refuse, status_of
from edge.security.access import CALLER, INFER, INFER_STREAM, TELEMETRY_WATCH, Access
from edge.security.rate import client_of
from edge.serving.call import Call
from edge.serving.extensions import Extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.statuses import Code
from edge.serving.streams import DRAINING, Draining, Streams
from edge.serving.traces import carry
from edge.serving.waiting import Waiting
from edge.telemetry.telemetry import Telemetry

# These two services register themselves in protobuf's default pool. Ours has what reflection describes.
for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
    POOL.AddSerializedFile(_file.serialized_pb)
_STATUS: Any = GetMessageClass(POOL.FindServiceByName(HEALTH).methods_by_name["Check"].output_type)
_MIN_WATCH_MS: Final = 100
_DEFAULT_WATCH_MS: Final = 1000


def _unary(respond: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    """Make an RPC of a function from the servicer and the request to the response, or to an awaitable of it."""

    @wraps(respond)
    async def method(self: Any, request: Any, context: Any) -> Any:
        response = respond(self, request)
        return await response if isawaitable(response) else response

    return method


class InferenceServicer:
    """``inference.GRPCInferenceService``; ``access`` is checked again for each request of a stream."""

    def __init__(
        self,
        service: InferenceService,
        metadata: Metadata,
        streams: Streams,
        extensions: Extensions,
        access: Access | None = None,
    ) -> None:
        self._access, self._service = access, service
        self.cancel_model_infer = service.cancel
        self._metadata, self._streams, self._extensions = metadata, streams, extensions

    ServerLive = _unary(lambda self, _: pb.ServerLiveResponse(live=True))
    ServerReady = _unary(lambda self, _: pb.ServerReadyResponse(ready=self._metadata.server_ready()))
    ModelReady = _unary(lambda self, request: pb.ModelReadyResponse(ready=self._metadata.model_ready(request)))
    ServerMetadata = _unary(lambda self, _: self._metadata.server_metadata())
    ModelStatistics = _unary(lambda self, request: self._metadata.model_statistics(request))
    SystemSharedMemoryStatus = _unary(lambda self, request: self._extensions.shared_memory_status(request))
    SystemSharedMemoryRegister = _unary(lambda self, request: self._extensions.register_shared_memory(request))
    SystemSharedMemoryUnregister = _unary(lambda self, request: self._extensions.unregister_shared_memory(request))
    CudaSharedMemoryStatus = _unary(lambda self, _: pb.CudaSharedMemoryStatusResponse())
    CudaSharedMemoryRegister = _unary(lambda self, _: self._extensions.refuse_cuda_shared_memory())
    CudaSharedMemoryUnregister = _unary(lambda self, _: pb.CudaSharedMemoryUnregisterResponse())
    TraceSetting = _unary(lambda self, request: self._extensions.trace_setting(request))
    RepositoryModelLoad = _unary(lambda self, request: self._extensions.load_model(request))
    RepositoryModelUnload = _unary(lambda self, request: self._extensions.unload_model(request))
    LogSettings = _unary(lambda self, request: self._extensions.log_settings(request))

    async def ModelMetadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:
        self._name_caller(context)  # it may load a model, which counts in the caller's rate
        return await self._metadata.model_metadata(request, lambda: self._authorize(context, INFER))

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        self._name_caller(context)
        return await self._metadata.model_config(request, lambda: self._authorize(context, INFER))

    async def RepositoryIndex(self, request: Any, context: Any) -> pb.RepositoryIndexResponse:
        await self._extensions.list_unloaded(request.repository_name)
        return self._metadata.repository_index(request)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> Any:
        self._introduce(context, "ModelInfer")
        return await self._service.infer(request, _deadline(context))

    def start_model_infer(
        self,
        request: pb.ModelInferRequest | Status,
        context: Any,
        end: Callable[[pb.ModelInferResponse | Status], None],
    ) -> Call | Waiting | None:
        """Start ModelInfer as :class:`edge.http2.rpc.Direct`; the request is a status if its bytes were refused."""
        if isinstance(request, Status):
            end(request)
            return None
        self._introduce(context, "ModelInfer")

        def reply(outcome: pb.ModelInferResponse | Exception) -> None:
            end(status_of(outcome, "ModelInfer") if isinstance(outcome, Exception) else outcome)

        return self._service.start(request, _deadline(context), reply)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> None:
        self._introduce(context, "ModelStreamInfer")

        async def read() -> pb.ModelInferRequest | None:
            request: pb.ModelInferRequest | None = await read_from(context)
            self._authorize(context, INFER_STREAM)
            return request

        try:
            await self._streams.answer(read, context.write, _deadline(context))
        except Draining:
            raise Refused(Code.UNAVAILABLE, DRAINING) from None

    def _introduce(self, context: Any, method: str) -> None:
        """Name the caller, and keep its trace context for traces."""
        self._name_caller(context)
        if self._service.traces:
            carry(method, context.invocation_metadata())

    def _authorize(self, context: Any, rpc: str) -> None:
        if self._access:
            self._access.authorize(authorization(context.invocation_metadata()), rpc)

    def _name_caller(self, context: Any) -> None:
        """Name the caller for its rate limit, unless its token has."""
        if self._service.limited and not CALLER.get():
            CALLER.set(_address_of(context.peer()))


@lru_cache
def _address_of(peer: str) -> str:
    _, _, address = peer.partition(":")  # of gRPC's notation, such as ipv6:%5B::1%5D:50051
    return client_of(unquote(address).rpartition(":")[0].strip("[]"))


def _deadline(context: Any) -> float | None:
    """Return the client's deadline in ``time.monotonic()`` seconds; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


class HealthServicer:
    """``grpc.health.v1.Health``: of the server, its services and its models by name. It belongs to one event loop.

    gRPC's own servicer forgets the other watchers of a name when one leaves, and its watchers block the shutdown.
    """

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


class TelemetryServicer:
    """``fewheads.telemetry.v1.Telemetry``; watches end once ``draining`` is set.

    ``access`` is checked again before each further reading of a watch.
    """

    def __init__(self, telemetry: Telemetry, access: Access | None, draining: asyncio.Event) -> None:
        self._telemetry, self._access, self._draining = telemetry, access, draining

    async def Get(self, request: telemetry_pb2.GetRequest, context: Any) -> telemetry_pb2.Reading:
        return await asyncio.to_thread(self._telemetry.reading)

    async def Watch(self, request: telemetry_pb2.WatchRequest, context: Any) -> None:
        interval_ms = request.interval_ms or _DEFAULT_WATCH_MS
        if interval_ms < _MIN_WATCH_MS:
            expected, fix = f"at least {_MIN_WATCH_MS}", "0 means once a second."
            raise InvalidRequest("interval_ms", given=interval_ms, expected=expected, fix=fix)
        while True:
            await context.write(await asyncio.to_thread(self._telemetry.reading))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._draining.wait(), interval_ms / 1000)
                raise Refused(Code.UNAVAILABLE, DRAINING)
            if self._access:
                self._access.authorize(authorization(context.invocation_metadata()), TELEMETRY_WATCH)


class ReflectionServicer:
    """``grpc.reflection.v1alpha.ServerReflection`` of the services with these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    async def ServerReflectionInfo(self, _: object, context: Any) -> None:
        async def requests() -> AsyncIterator[Any]:
            while (request := await read_from(context)) is not None:
                yield request

        servicer = await asyncio.to_thread(self._servicer)
        async for response in servicer.ServerReflectionInfo(requests(), context):
            await context.write(response)

    def _servicer(self) -> Any:
        from grpc_reflection.v1alpha import reflection  # imports grpcio, which few servers on nghttp2 ever need

        return reflection.aio.ReflectionServicer(self._names, pool=POOL)


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
        self.port = 0  # until the server listens, and on a Unix socket
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
