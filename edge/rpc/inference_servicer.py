"""``inference.GRPCInferenceService``: each method calls the part of the server that answers it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import lru_cache, wraps
from inspect import isawaitable
from typing import Any
from urllib.parse import unquote

from edge.pb import inference_pb2 as pb
from edge.rpc.methods import Refused, Status, authorization, read_from, status_of
from edge.security.access import CALLER, INFER_STREAM, Access
from edge.security.rate import client_of
from edge.serving.call import Call
from edge.serving.extensions import Extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.statuses import Code
from edge.serving.streams import DRAINING, Draining, Streams
from edge.serving.traces import carry


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
    ModelMetadata = _unary(lambda self, request: self._metadata.model_metadata(request))
    ModelConfig = _unary(lambda self, request: self._metadata.model_config(request))
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

    async def RepositoryIndex(self, request: Any, context: Any) -> pb.RepositoryIndexResponse:
        await self._extensions.list_unloaded(request.repository_name)
        return self._metadata.repository_index(request)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> Any:
        self._introduce(context)
        return await self._service.infer(request, _deadline(context))

    def start_model_infer(
        self,
        request: pb.ModelInferRequest | Status,
        context: Any,
        end: Callable[[pb.ModelInferResponse | Status], None],
    ) -> Call | None:
        """Start ModelInfer as :class:`edge.http2.rpc.Direct`; the request is a status if its bytes were refused."""
        if isinstance(request, Status):
            end(request)
            return None
        self._introduce(context)

        def reply(outcome: pb.ModelInferResponse | Exception) -> None:
            end(status_of(outcome, "ModelInfer") if isinstance(outcome, Exception) else outcome)

        return self._service.start(request, _deadline(context), reply)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> None:
        self._introduce(context)

        async def read() -> pb.ModelInferRequest | None:
            request: pb.ModelInferRequest | None = await read_from(context)
            if self._access:
                self._access.authorize(authorization(context.invocation_metadata()), INFER_STREAM)
            return request

        try:
            await self._streams.answer(read, context.write, _deadline(context))
        except Draining:
            raise Refused(Code.UNAVAILABLE, DRAINING) from None

    def _introduce(self, context: Any) -> None:
        """Name the caller for its rate limit, unless its token has, and keep its trace context for traces."""
        if self._service.limited and not CALLER.get():
            CALLER.set(_address_of(context.peer()))
        if self._service.traced:
            carry(context.invocation_metadata())


@lru_cache
def _address_of(peer: str) -> str:
    _, _, address = peer.partition(":")  # of gRPC's notation, such as ipv6:%5B::1%5D:50051
    return client_of(unquote(address).rpartition(":")[0].strip("[]"))


def _deadline(context: Any) -> float | None:
    """Return the client's deadline in ``time.monotonic()`` seconds; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
