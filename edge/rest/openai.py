"""OpenAI's completions and models, for clients of its API, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.repository.entry import Entry
from edge.rest.completions import Choices, completion_of
from edge.rest.endpoint import Endpoints, failed, read_body, unless_gone
from edge.serving.call import InferResponse
from edge.serving.inference import InferenceService
from edge.serving.streams import Streams
from edge.serving.text_models import DOES, TextGenerator, TextModel, TextModels

#: Sends an event with a JSON document, and waits while the client cannot take more.
SendEvent = Callable[[object], Awaitable[None]]


class EventStream(Response):
    """The events that ``work`` sends, and then ``[DONE]``; a client that disconnects cancels the work.

    The response begins with the first event, so that an error before it has its own status; a later one is an event.
    """

    media_type = "text/event-stream"

    def __init__(self, request: Request, work: Callable[[SendEvent], Awaitable[None]]) -> None:
        self.status_code = 200
        self._request, self._work = request, work
        self.init_headers({"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})

        async def send_event(document: object) -> None:
            # In ASCII: some clients take other characters of Unicode for the end of a line.
            await write(json.dumps(document, separators=(",", ":")).encode())

        try:
            await unless_gone(self._request, self._work(send_event))
            last = b"[DONE]"
        except ClientDisconnect:
            return
        except Exception as error:
            failure = failed(self._request, error)
            if not begun:
                await failure(scope, receive, send)
                return
            last = bytes(failure.body)
        await write(last, more=False)


class OpenAiApi:
    """Answers requests of OpenAI's clients with the models that generate text."""

    def __init__(self, service: InferenceService, streams: Streams, models: TextModels, endpoints: Endpoints) -> None:
        self._service, self._streams, self._models, self._endpoints = service, streams, models, endpoints

    async def complete(self, request: Request) -> object:
        """Answer a request for completions, at once or as events."""
        body, threads = await self._endpoints.body(request), self._service.threads
        completion = await read_body(request, body, threads, completion_of)
        self._service.admit()  # before a model is loaded for it
        model = await unless_gone(request, self._models.find(completion.model, TextGenerator, len(body)))
        answers = Choices(completion, model)
        if completion.stream:
            return EventStream(request, lambda send: self._stream(answers, completion.include_usage, send))
        choices: list[dict[str, Any]] = []

        async def add(response: InferResponse, final: bool) -> None:
            choices.append(answers.choice(response, final))

        await unless_gone(request, self._streams.answer_all(answers.requests(), add))
        choices.sort(key=lambda choice: choice["index"])
        writing = partial(answers.body, choices)
        content = await threads.run(0, writing, accepted=True) if answers.slow else writing()
        return Response(content, media_type="application/json")

    def models(self, request: Request) -> object:
        """Return the models that read texts, and what each does."""
        return {"object": "list", "data": [_described(*listed) for listed in self._models]}

    def model(self, request: Request) -> object:
        """Return one of :meth:`models`."""
        return _described(*self._models.get(request.path_params["model"]))

    async def _stream(self, answers: Choices, include_usage: bool, send: SendEvent) -> None:
        more = {"usage": None} if include_usage else {}

        async def write(response: InferResponse, final: bool) -> None:
            choice = answers.choice(response, final)
            if choice["text"] or choice["finish_reason"] or (choice["logprobs"] and choice["logprobs"]["tokens"]):
                await send(answers.document([choice], **more))

        await self._streams.answer_all(answers.requests(), write)
        if include_usage:
            await send(answers.document([], usage=answers.usage()))


def _described(entry: Entry, kind: type[TextModel]) -> dict[str, Any]:
    about = {"id": entry.name, "object": "model", "created": entry.created, "owned_by": "fewheads"}
    return {**about, "capabilities": [DOES[kind]]}
