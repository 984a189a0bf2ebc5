"""Routes of the protocol over HTTP and JSON, each with the part of the server that answers it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.pb import inference_pb2 as pb
from edge.protocol import HEALTH, INFERENCE
from edge.rest.endpoint import Endpoints, Handler, http_error, json_response, unless_gone
from edge.rest.infer import InferEndpoint
from edge.rest.json_messages import (
    field,
    load_parameters,
    log_settings,
    parse,
    plain,
    region,
    trace_of,
    trace_setting,
    values_of,
)
from edge.rest.openai import OpenAiApi
from edge.rest.texts import TextApi
from edge.rest.traced import Traced
from edge.security.access import INFER, Access, Hosts
from edge.serving.extensions import Extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.streams import Streams
from edge.serving.text_models import TextModels
from edge.serving.traces import Traces

_M = TypeVar("_M", bound=Message)
#: Methods, path, RPC whose scopes apply, handler.
_Row = tuple[str, str, str, Handler]
#: Orchestrators have no token, and gRPC's health check needs none either.
_HEALTH: Final = f"/{HEALTH}/Check"
_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = _MODEL + "/versions/{version}"
_SYSTEM: Final = "/v2/systemsharedmemory"
_CUDA: Final = "/v2/cudasharedmemory"


class RestApi:
    """Answers the protocol over HTTP with the same methods as gRPC. Without ``access``, everyone may do everything.

    Without ``hosts``, any header ``Host`` is accepted.
    """

    def __init__(
        self,
        service: InferenceService,
        streams: Streams,
        metadata: Metadata,
        models: TextModels,
        extensions: Extensions,
        access: Access | None,
        max_message_bytes: int,
        hosts: Hosts | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._metadata, self._extensions, self._traces = metadata, extensions, traces
        self._endpoints = Endpoints(access, max_message_bytes, hosts)
        self._infer = InferEndpoint(service, self._endpoints)
        self._openai = OpenAiApi(service, streams, models, self._endpoints)
        self._texts = TextApi(service, streams, models, self._endpoints)
        self.application = Starlette(routes=list(self._routes()), exception_handlers={HTTPException: http_error})
        self.application.router.redirect_slashes = False

    def _routes(self) -> Iterator[Route]:
        for methods, path, rpc, handler in self._rows():
            # Only inference is traced, as over gRPC.
            traced = [Middleware(Traced, self._traces, path)] if self._traces and rpc == "ModelInfer" else []
            rpc = rpc if rpc.startswith("/") else f"/{INFERENCE}/{rpc}"
            yield Route(path, self._endpoints.endpoint(handler, rpc), methods=methods.split(), middleware=traced)

    def _rows(self) -> list[_Row]:
        metadata = self._metadata
        versioned: list[_Row] = [
            ("GET", "", "ModelMetadata", self._model_metadata),
            ("GET", "/config", "ModelConfig", self._model_config),
            ("GET", "/ready", "ModelReady", self._model_ready),
            ("GET", "/stats", "ModelStatistics", self._model_statistics),
        ]
        return [
            # First, because most requests are for them, and routes are compared one by one.
            *(("POST", f"{prefix}/infer", "ModelInfer", self._infer.infer) for prefix in (_MODEL, _VERSION)),
            ("GET", "/v2", "ServerMetadata", lambda r: plain(metadata.server_metadata())),
            ("GET", "/v2/health/live", _HEALTH, lambda r: {"live": True}),
            ("GET", "/v2/health/ready", _HEALTH, lambda r: _readiness({"ready": metadata.server_ready()})),
            ("GET", "/v2/models/stats", "ModelStatistics", self._model_statistics),  # before the models, as in Triton
            *((row[0], f"{prefix}{row[1]}", *row[2:]) for prefix in (_MODEL, _VERSION) for row in versioned),
            ("POST", "/v2/repository/index", "RepositoryIndex", self._index),
            ("POST", "/v2/repository/models/{model}/load", "RepositoryModelLoad", self._load),
            ("POST", "/v2/repository/models/{model}/unload", "RepositoryModelUnload", self._unload),
            ("GET", f"{_SYSTEM}/status", "SystemSharedMemoryStatus", self._shared_memory),
            ("GET", f"{_SYSTEM}/region/{{region}}/status", "SystemSharedMemoryStatus", self._shared_memory),
            ("POST", f"{_SYSTEM}/region/{{region}}/register", "SystemSharedMemoryRegister", self._register),
            ("POST", f"{_SYSTEM}/region/{{region}}/unregister", "SystemSharedMemoryUnregister", self._unregister),
            ("POST", f"{_SYSTEM}/unregister", "SystemSharedMemoryUnregister", self._unregister),
            ("GET", f"{_CUDA}/status", "CudaSharedMemoryStatus", lambda r: []),
            ("GET", f"{_CUDA}/region/{{region}}/status", "CudaSharedMemoryStatus", lambda r: []),
            ("POST", f"{_CUDA}/region/{{region}}/register", "CudaSharedMemoryRegister", self._register_cuda),
            ("POST", f"{_CUDA}/region/{{region}}/unregister", "CudaSharedMemoryUnregister", lambda r: {}),
            ("POST", f"{_CUDA}/unregister", "CudaSharedMemoryUnregister", lambda r: {}),
            ("GET POST", "/v2/logging", "LogSettings", self._logging),
            ("GET POST", "/v2/trace/setting", "TraceSetting", self._trace),
            ("GET POST", f"{_MODEL}/trace/setting", "TraceSetting", self._trace),
            ("POST", "/v1/completions", "ModelInfer", self._openai.complete),
            ("POST", "/v1/embeddings", "ModelInfer", self._texts.embeddings),
            ("POST", "/embed", "ModelInfer", self._texts.embed),
            ("POST", "/rerank", "ModelInfer", self._texts.rerank),
            *(("POST", f"/{version}/rerank", "ModelInfer", self._texts.cohere_rerank) for version in ("v1", "v2")),
            ("GET", "/v1/models", "RepositoryIndex", self._openai.models),
            ("GET", "/v1/models/{model}", "ModelMetadata", self._openai.model),
        ]

    def _model_ready(self, request: Request) -> object:
        message = _named(pb.ModelReadyRequest, request)
        return _readiness({"name": message.name, "ready": self._metadata.model_ready(message)})

    async def _model_metadata(self, request: Request) -> object:
        may_infer = partial(self._endpoints.authorize, request, INFER)
        metadata = self._metadata.model_metadata(_named(pb.ModelMetadataRequest, request), may_infer)
        return plain(await unless_gone(request, metadata))

    async def _model_config(self, request: Request) -> object:
        may_infer = partial(self._endpoints.authorize, request, INFER)
        config = self._metadata.model_config(_named(pb.ModelConfigRequest, request), may_infer)
        return plain((await unless_gone(request, config)).config)

    def _model_statistics(self, request: Request) -> object:
        return plain(self._metadata.model_statistics(_named(pb.ModelStatisticsRequest, request)))

    async def _index(self, request: Request) -> object:
        ready = field(await self._document(request), "ready", bool, default=False)
        await self._extensions.list_unloaded()
        index = self._metadata.repository_index(pb.RepositoryIndexRequest(ready=ready))
        return [plain(model) for model in index.models]

    async def _load(self, request: Request) -> object:
        parameters, model = load_parameters(await self._document(request)), request.path_params["model"]
        message = pb.RepositoryModelLoadRequest(model_name=model, parameters=parameters)
        return plain(await self._extensions.load_model(message))

    async def _unload(self, request: Request) -> object:
        parameters, model = load_parameters(await self._document(request)), request.path_params["model"]
        message = pb.RepositoryModelUnloadRequest(model_name=model, parameters=parameters)
        return plain(await self._extensions.unload_model(message))

    def _shared_memory(self, request: Request) -> object:
        message = pb.SystemSharedMemoryStatusRequest(name=request.path_params.get("region", ""))
        regions = self._extensions.shared_memory_status(message).regions
        return [plain(regions[name]) for name in sorted(regions)]

    async def _register(self, request: Request) -> object:
        message = region(request.path_params["region"], await self._document(request))
        return plain(self._extensions.register_shared_memory(message))

    def _unregister(self, request: Request) -> object:
        message = pb.SystemSharedMemoryUnregisterRequest(name=request.path_params.get("region", ""))
        return plain(self._extensions.unregister_shared_memory(message))

    def _register_cuda(self, request: Request) -> object:
        self._extensions.refuse_cuda_shared_memory()

    async def _logging(self, request: Request) -> object:
        return values_of(self._extensions.log_settings(log_settings(await self._document(request))).settings)

    async def _trace(self, request: Request) -> object:
        message = trace_setting(request.path_params.get("model", ""), await self._document(request))
        return trace_of(self._extensions.trace_setting(message))

    async def _document(self, request: Request) -> dict[str, Any]:
        return parse(await self._endpoints.body(request))


def _named(kind: type[_M], request: Request) -> _M:
    return kind(name=request.path_params.get("model", ""), version=request.path_params.get("version", ""))


def _readiness(answer: dict[str, Any]) -> Response:
    return json_response(answer, 200 if answer["ready"] else 400)
