"""ModelInfer over HTTP. What is large is read and written on threads beside the event loop."""

from __future__ import annotations

from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from edge.pb import inference_pb2 as pb
from edge.rest.endpoint import Endpoints, unless_gone
from edge.rest.infer import (
    JSON_LENGTH,
    all_binary,
    check_outputs,
    infer_request,
    infer_response,
    json_bytes,
    text_bytes,
)
from edge.rest.json_messages import INLINE_JSON_BYTES
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.traces import carry

#: Tensors up to this size are written as JSON in two milliseconds.
_INLINE_TENSOR_BYTES: Final = 16 * 1024


class InferEndpoint:
    """Answers requests to infer."""

    def __init__(self, service: InferenceService, metadata: Metadata, endpoints: Endpoints) -> None:
        self._service, self._metadata, self._endpoints = service, metadata, endpoints

    async def infer(self, request: Request) -> Response:
        """Answer a request."""
        body = await self._endpoints.body(request)
        return await unless_gone(request, self._answer(request, body))

    async def _answer(self, request: Request, body: bytes) -> Response:
        path, json_length = request.path_params, request.headers.get(JSON_LENGTH)
        read = partial(infer_request, path["model"], path.get("version", ""), body, json_length)
        threads = self._service.threads
        if json_bytes(len(body), json_length) > INLINE_JSON_BYTES:
            message, wanted = await threads.run(len(body), read)
        else:
            message, wanted = read()
        del body, read  # the message has its own copy
        if not all_binary(message, wanted):
            metadata = pb.ModelMetadataRequest(name=message.model_name, version=message.model_version)
            check_outputs(message, wanted, self._metadata.model_metadata(metadata))
        if self._service.traced:
            carry(request.headers.items())
        response = await self._service.infer(message, None)
        size_bytes = text_bytes(response, wanted)
        if size_bytes > _INLINE_TENSOR_BYTES:
            write = partial(infer_response, response, wanted)
            content, length = await threads.run(size_bytes, write, accepted=True)
        else:
            content, length = infer_response(response, wanted)
        if length is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={JSON_LENGTH: str(length)}, media_type="application/octet-stream")
