"""OpenAI's completions and models, for clients of its API."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edge.pb import inference_pb2 as pb
from edge.rest.completions import Answers, completion_of
from edge.rest.endpoint import Endpoints, unless_gone
from edge.rest.events import EventStream, SendEvent
from edge.rest.json_messages import INLINE_JSON_BYTES, parse
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata, TextModel
from edge.serving.streams import Streams
from edge.serving.traces import carry


class OpenAiApi:
    """Answers requests of OpenAI's clients with the models that generate text."""

    def __init__(self, service: InferenceService, streams: Streams, metadata: Metadata, endpoints: Endpoints) -> None:
        self._service, self._streams, self._metadata, self._endpoints = service, streams, metadata, endpoints

    async def complete(self, request: Request) -> object:
        """Answer a request for completions, at once or as events."""
        body, threads = await self._endpoints.body(request), self._service.threads
        if len(body) > INLINE_JSON_BYTES:
            reading = threads.run(len(body), lambda: completion_of(parse(body)))
            completion = await unless_gone(request, reading)
        else:
            completion = completion_of(parse(body))
        answers = Answers(completion, self._metadata.text_model(completion.model))
        if self._service.traced:
            carry(request.headers.items())
        if completion.stream:
            return EventStream(request, lambda send: self._stream(answers, completion.include_usage, send))
        choices: list[dict[str, Any]] = []

        async def add(response: pb.ModelStreamInferResponse) -> None:
            choices.append(answers.choice(response))

        await unless_gone(request, self._streams.answer_all(answers.requests(), add))
        choices.sort(key=lambda choice: choice["index"])
        writing = partial(answers.body, choices)
        content = await threads.run(0, writing, accepted=True) if answers.slow else writing()
        return Response(content, media_type="application/json")

    def models(self, request: Request) -> object:
        """Return the models that generate text."""
        return {"object": "list", "data": [_described(model) for model in self._metadata.text_models()]}

    def model(self, request: Request) -> object:
        """Return one model."""
        return _described(self._metadata.text_model(request.path_params["model"]))

    async def _stream(self, answers: Answers, include_usage: bool, send: SendEvent) -> None:
        more = {"usage": None} if include_usage else {}

        async def write(response: pb.ModelStreamInferResponse) -> None:
            choice = answers.choice(response)
            if choice["text"] or choice["finish_reason"] or (choice["logprobs"] and choice["logprobs"]["tokens"]):
                await send(answers.document([choice], **more))

        await self._streams.answer_all(answers.requests(), write)
        if include_usage:
            await send(answers.document([], usage=answers.usage()))


def _described(found: TextModel) -> dict[str, Any]:
    model = found.model
    return {"id": model.name, "object": "model", "created": model.loaded_at, "owned_by": "fewheads"}
