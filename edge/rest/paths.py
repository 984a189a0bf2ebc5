"""Paths of the protocol over HTTP and JSON. It only translates."""

from __future__ import annotations

from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.pb import inference_pb2 as pb
from edge.rest.endpoint import Endpoints, Handler, http_error, json_response, unless_gone
from edge.rest.infer import JSON_LENGTH, all_binary, check_outputs, infer_request, infer_response
from edge.rest.json_messages import field, parse, plain
from edge.rest.messages import load_parameters, log_settings, region, settings_of, trace_of, trace_setting
from edge.security.access import Access
from edge.serving.extensions import Extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.traces import carry

_INFERENCE: Final = "/inference.GRPCInferenceService/"
#: Orchestrators have no place to keep a token, here as there.
_HEALTH: Final = "/grpc.health.v1.Health/Check"
_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = _MODEL + "/versions/{version}"
_SHARED: Final = "/v2/systemsharedmemory"
_CUDA: Final = "/v2/cudasharedmemory"

#: The RPC that a path stands for, and what answers it.
_Row = tuple[str, Handler]


class RestApi:
    """Answers the protocol over HTTP, by the same methods as gRPC.

    Args:
        service: answers inference requests.
        metadata: answers what clients ask about the server and its models.
        extensions: control of models, shared memory and settings.
        access: who may call what; None lets everyone.
        max_message_bytes: the largest body that is read.

    Attributes:
        application: the ASGI application.
    """

    def __init__(
        self,
        service: InferenceService,
        metadata: Metadata,
        extensions: Extensions,
        access: Access | None,
        max_message_bytes: int,
    ) -> None:
        self._service = service
        self._metadata = metadata
        self._extensions = extensions
        self._endpoints = Endpoints(access, max_message_bytes)
        self.application = Starlette(
            routes=[
                Route(path, self._endpoints.endpoint(handler, rpc), methods=[method])
                for method, rows in (("POST", self._posts()), ("GET", self._gets()))
                for path, (rpc, handler) in rows.items()
            ],
            exception_handlers={HTTPException: http_error},
        )
        self.application.router.redirect_slashes = False

    def _posts(self) -> dict[str, _Row]:
        infer = (f"{_INFERENCE}ModelInfer", self._infer)
        unregister = (f"{_INFERENCE}SystemSharedMemoryUnregister", self._unregister)
        unregister_cuda = (f"{_INFERENCE}CudaSharedMemoryUnregister", self._unregister_cuda)
        return {
            f"{_MODEL}/infer": infer,
            f"{_VERSION}/infer": infer,
            "/v2/repository/index": (f"{_INFERENCE}RepositoryIndex", self._index),
            "/v2/repository/models/{model}/load": (f"{_INFERENCE}RepositoryModelLoad", self._load),
            "/v2/repository/models/{model}/unload": (f"{_INFERENCE}RepositoryModelUnload", self._unload),
            f"{_SHARED}/region/{{region}}/register": (f"{_INFERENCE}SystemSharedMemoryRegister", self._register),
            f"{_SHARED}/region/{{region}}/unregister": unregister,
            f"{_SHARED}/unregister": unregister,
            f"{_CUDA}/region/{{region}}/register": (f"{_INFERENCE}CudaSharedMemoryRegister", self._register_cuda),
            f"{_CUDA}/region/{{region}}/unregister": unregister_cuda,
            f"{_CUDA}/unregister": unregister_cuda,
            **self._settings(),
        }

    def _gets(self) -> dict[str, _Row]:
        statistics = (f"{_INFERENCE}ModelStatistics", self._model_statistics)
        shared = (f"{_INFERENCE}SystemSharedMemoryStatus", self._shared_memory)
        cuda = (f"{_INFERENCE}CudaSharedMemoryStatus", self._cuda)
        of_models: dict[str, _Row] = {
            "": (f"{_INFERENCE}ModelMetadata", self._model_metadata),
            "/ready": (f"{_INFERENCE}ModelReady", self._model_ready),
            "/config": (f"{_INFERENCE}ModelConfig", self._model_config),
            "/stats": statistics,
        }
        return {
            "/v2": (f"{_INFERENCE}ServerMetadata", self._server_metadata),
            "/v2/health/live": (_HEALTH, self._live),
            "/v2/health/ready": (_HEALTH, self._ready),
            "/v2/models/stats": statistics,  # before the models, as in Triton
            **{f"{_MODEL}{path}": row for path, row in of_models.items()},
            **{f"{_VERSION}{path}": row for path, row in of_models.items()},
            f"{_SHARED}/status": shared,
            f"{_SHARED}/region/{{region}}/status": shared,
            f"{_CUDA}/status": cuda,
            f"{_CUDA}/region/{{region}}/status": cuda,
            **self._settings(),
        }

    def _settings(self) -> dict[str, _Row]:
        """Paths that are read by GET and changed by POST: settings that are not given stay as they are."""
        trace = (f"{_INFERENCE}TraceSetting", self._trace)
        return {
            "/v2/logging": (f"{_INFERENCE}LogSettings", self._logging),
            "/v2/trace/setting": trace,
            f"{_MODEL}/trace/setting": trace,
        }

    async def _infer(self, request: Request) -> object:
        body = await self._endpoints.body(request)
        message, wanted = infer_request(
            request.path_params["model"], _version(request), body, request.headers.get(JSON_LENGTH)
        )
        del body  # the message has its own copy
        if not all_binary(message, wanted):
            metadata = pb.ModelMetadataRequest(name=message.model_name, version=message.model_version)
            check_outputs(message, wanted, self._metadata.model_metadata(metadata))
        if self._service.traced:
            carry(request.headers.items())
        response = await unless_gone(request, self._service.infer(message, None))
        content, json_bytes = infer_response(response, wanted)
        if json_bytes is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={JSON_LENGTH: str(json_bytes)}, media_type="application/octet-stream")

    async def _live(self, request: Request) -> object:
        return {"live": True}

    async def _ready(self, request: Request) -> object:
        return _readiness({"ready": self._metadata.server_ready()})

    async def _model_ready(self, request: Request) -> object:
        message = pb.ModelReadyRequest(name=request.path_params["model"], version=_version(request))
        return _readiness({"name": message.name, "ready": self._metadata.model_ready(message)})

    async def _server_metadata(self, request: Request) -> object:
        return plain(self._metadata.server_metadata())

    async def _model_metadata(self, request: Request) -> object:
        message = pb.ModelMetadataRequest(name=request.path_params["model"], version=_version(request))
        return plain(self._metadata.model_metadata(message))

    async def _model_config(self, request: Request) -> object:
        message = pb.ModelConfigRequest(name=request.path_params["model"], version=_version(request))
        return plain(self._metadata.model_config(message).config)

    async def _model_statistics(self, request: Request) -> object:
        message = pb.ModelStatisticsRequest(name=request.path_params.get("model", ""), version=_version(request))
        return plain(self._metadata.model_statistics(message))

    async def _index(self, request: Request) -> object:
        ready = field(await self._document(request), "ready", bool, default=False)
        await self._extensions.list_unloaded()
        index = self._metadata.repository_index(pb.RepositoryIndexRequest(ready=ready))
        return [plain(model) for model in index.models]

    async def _load(self, request: Request) -> object:
        parameters = load_parameters(await self._document(request))
        model = request.path_params["model"]
        await self._extensions.load_model(pb.RepositoryModelLoadRequest(model_name=model, parameters=parameters))
        return {}

    async def _unload(self, request: Request) -> object:
        parameters = load_parameters(await self._document(request))
        model = request.path_params["model"]
        await self._extensions.unload_model(pb.RepositoryModelUnloadRequest(model_name=model, parameters=parameters))
        return {}

    async def _shared_memory(self, request: Request) -> object:
        message = pb.SystemSharedMemoryStatusRequest(name=request.path_params.get("region", ""))
        regions = self._extensions.shared_memory_status(message).regions
        return [plain(regions[name]) for name in sorted(regions)]

    async def _register(self, request: Request) -> object:
        message = region(request.path_params["region"], await self._document(request))
        self._extensions.register_shared_memory(message)
        return {}

    async def _unregister(self, request: Request) -> object:
        name = request.path_params.get("region", "")
        self._extensions.unregister_shared_memory(pb.SystemSharedMemoryUnregisterRequest(name=name))
        return {}

    async def _cuda(self, request: Request) -> object:
        return []

    async def _register_cuda(self, request: Request) -> object:
        self._extensions.refuse_cuda_shared_memory()
        return {}

    async def _unregister_cuda(self, request: Request) -> object:
        return {}

    async def _logging(self, request: Request) -> object:
        return settings_of(self._extensions.log_settings(log_settings(await self._document(request))))

    async def _trace(self, request: Request) -> object:
        message = trace_setting(request.path_params.get("model", ""), await self._document(request))
        return trace_of(self._extensions.trace_setting(message))

    async def _document(self, request: Request) -> dict[str, Any]:
        return parse(await self._endpoints.body(request))


def _version(request: Request) -> str:
    return str(request.path_params.get("version", ""))


def _readiness(answer: dict[str, Any]) -> Response:
    return json_response(answer, 200 if answer["ready"] else 400)
