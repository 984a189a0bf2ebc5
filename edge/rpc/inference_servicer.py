"""``inference.GRPCInferenceService``: each method calls the part of the server that answers it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from edge.pb import inference_pb2 as pb
from edge.rpc.caller import authorize_again, name_caller
from edge.rpc.methods import UNPARSEABLE, Status, rpc, status_of
from edge.security.access import Access
from edge.security.scopes import INFER_STREAM
from edge.serving.call import Call
from edge.serving.extensions import Extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.streams import DRAINING, Draining, Streams, Unparseable
from edge.serving.traces import carry


class InferenceServicer:
    """``inference.GRPCInferenceService``: each method asks the service and passes the answer on.

    Args:
        service: answers inference requests.
        metadata: answers what clients ask about the server and its models.
        streams: answers streams.
        extensions: answers Triton's extensions.
        access: asked again for each request of a stream; None lets everyone call everything.
    """

    def __init__(
        self,
        service: InferenceService,
        metadata: Metadata,
        streams: Streams,
        extensions: Extensions,
        access: Access | None = None,
    ) -> None:
        self._access = access
        self._service = service
        self._metadata = metadata
        self._streams = streams
        self._extensions = extensions

    def _introduce(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Name the caller and, where requests are traced, keep its trace context."""
        if self._service.limited:
            name_caller(context)
        if self._service.traced:
            carry(context.invocation_metadata())

    @rpc
    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @rpc
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._metadata.server_ready())

    @rpc
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._metadata.model_ready(request))

    @rpc
    async def ServerMetadata(self, request: Any, context: Any) -> pb.ServerMetadataResponse:
        return self._metadata.server_metadata()

    @rpc
    async def ModelMetadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:
        return self._metadata.model_metadata(request)

    @rpc
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        return self._metadata.model_config(request)

    @rpc
    async def ModelStatistics(self, request: Any, context: Any) -> pb.ModelStatisticsResponse:
        return self._metadata.model_statistics(request)

    @rpc
    async def RepositoryIndex(self, request: Any, context: Any) -> pb.RepositoryIndexResponse:
        await self._extensions.list_unloaded(request.repository_name)
        return self._metadata.repository_index(request)

    @rpc
    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ModelInferResponse:
        self._introduce(context)
        return await self._service.infer(request, _deadline(context))

    def start_model_infer(
        self,
        request: pb.ModelInferRequest | None,
        context: grpc.aio.ServicerContext[Any, Any],
        end: Callable[[pb.ModelInferResponse | Status], None],
    ) -> Call | None:
        """Do what ModelInfer does, for a transport that needs no coroutine for it.

        Args:
            request: the client's message; None where it is not the protobuf of the method.
            context: of the call.
            end: receives the response or the status, once, maybe before this returns.

        Returns:
            What :meth:`cancel_model_infer` takes; None where the call has ended.
        """
        if request is None:
            end(Status(grpc.StatusCode.INTERNAL, UNPARSEABLE))
            return None
        self._introduce(context)

        def reply(outcome: pb.ModelInferResponse | Exception) -> None:
            end(status_of(outcome, "ModelInfer") if isinstance(outcome, Exception) else outcome)

        return self._service.start(request, _deadline(context), reply)

    def cancel_model_infer(self, call: Call) -> None:
        """Drop a call whose answer nobody waits for any more."""
        self._service.cancel(call)

    @rpc
    async def ModelStreamInfer(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._introduce(context)

        async def read() -> pb.ModelInferRequest | None:
            request = await context.read()
            if request is None:
                raise Unparseable
            authorize_again(self._access, INFER_STREAM, context)
            return None if request is grpc.aio.EOF else request

        try:
            await self._streams.answer(read, context.write, _deadline(context))
            return
        except Unparseable:
            code, details = grpc.StatusCode.INTERNAL, UNPARSEABLE
        except Draining:
            code, details = grpc.StatusCode.UNAVAILABLE, DRAINING
        await context.abort(code, details)  # not in the block above, for the reason in rpc()

    @rpc
    async def RepositoryModelLoad(self, request: Any, context: Any) -> pb.RepositoryModelLoadResponse:
        return await self._extensions.load_model(request)

    @rpc
    async def RepositoryModelUnload(self, request: Any, context: Any) -> pb.RepositoryModelUnloadResponse:
        return await self._extensions.unload_model(request)

    @rpc
    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> pb.SystemSharedMemoryStatusResponse:
        return self._extensions.shared_memory_status(request)

    @rpc
    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> pb.SystemSharedMemoryRegisterResponse:
        return self._extensions.register_shared_memory(request)

    @rpc
    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> pb.SystemSharedMemoryUnregisterResponse:
        return self._extensions.unregister_shared_memory(request)

    @rpc
    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> pb.CudaSharedMemoryStatusResponse:
        return pb.CudaSharedMemoryStatusResponse()

    @rpc
    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> pb.CudaSharedMemoryRegisterResponse:
        self._extensions.refuse_cuda_shared_memory()
        return pb.CudaSharedMemoryRegisterResponse()

    @rpc
    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> pb.CudaSharedMemoryUnregisterResponse:
        return pb.CudaSharedMemoryUnregisterResponse()

    @rpc
    async def TraceSetting(self, request: Any, context: Any) -> pb.TraceSettingResponse:
        return self._extensions.trace_setting(request)

    @rpc
    async def LogSettings(self, request: Any, context: Any) -> pb.LogSettingsResponse:
        return self._extensions.log_settings(request)


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Return the ``time.monotonic()`` seconds at which the client stops waiting; None if it waits for ever."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
