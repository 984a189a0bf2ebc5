"""Embeddings and ranks of texts, for clients of OpenAI, Text Embeddings Inference and Cohere."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from edge.bundles.preprocess import Tokens
from edge.datatypes import Array
from edge.errors import DeadlineExceeded, InvalidRequest, Overloaded, Raw, RunnerError
from edge.rest import documents
from edge.rest.documents import SEVERAL, Embeddings, Ranking
from edge.rest.endpoint import Endpoints, read_body, unless_gone
from edge.rest.json_messages import MAX_JSON_BYTES, parameters_of
from edge.serving.call import InferResponse
from edge.serving.inference import InferenceService
from edge.serving.request import InputTensor, RequestedOutput, UncheckedRequest
from edge.serving.streams import Streams
from edge.serving.text_models import Embedder, Reranker, TextModels
from edge.serving.waiting import in_time

T = TypeVar("T")
M = TypeVar("M", Embedder, Reranker)
#: Tokens of one run, padding included, where several texts share it: other requests wait for the run.
_RUN_TOKENS: Final = 2048
#: Runs of one request that wait or run at a time, so that other clients' requests come between them.
_RUNS: Final = 2
#: As many numbers are written as JSON in two milliseconds or so.
_INLINE_NUMBERS: Final = 4096


class TextApi:
    """Answers requests whose texts are embedded, or ranked for a query."""

    def __init__(self, service: InferenceService, streams: Streams, models: TextModels, endpoints: Endpoints) -> None:
        self._service, self._streams, self._models, self._endpoints = service, streams, models, endpoints

    async def embeddings(self, request: Request) -> Response:
        """Answer OpenAI's ``/v1/embeddings``."""
        return await self._embed(request, documents.openai_embeddings)

    async def embed(self, request: Request) -> Response:
        """Answer ``/embed`` of Text Embeddings Inference."""
        return await self._embed(request, documents.embed)

    async def rerank(self, request: Request) -> Response:
        """Answer ``/rerank`` of Text Embeddings Inference."""
        return await self._rank(request, documents.rerank)

    async def cohere_rerank(self, request: Request) -> Response:
        """Answer Cohere's ``/v1/rerank`` and ``/v2/rerank``."""
        return await self._rank(request, documents.cohere_rerank)

    async def _embed(self, request: Request, read: Callable[[Mapping[str, Any]], Embeddings]) -> Response:
        asked, size = await self._read(request, read)
        return await self._in_time(lambda deadline: self._embedded(request, asked, size, deadline))

    async def _rank(self, request: Request, read: Callable[[Mapping[str, Any]], Ranking]) -> Response:
        asked, size = await self._read(request, read)
        return await self._in_time(lambda deadline: self._ranked(request, asked, size, deadline))

    async def _in_time(self, answer: Callable[[float | None], Awaitable[Response]]) -> Response:
        """Answer within the server's limit for one request, by a deadline in ``time.monotonic()`` seconds."""
        limit = self._service.default_timeout_seconds
        return await in_time(answer(None if limit is None else time.monotonic() + limit), limit)

    async def _embedded(self, request: Request, asked: Embeddings, size: int, deadline: float | None) -> Response:
        self._service.admit()  # before a model is loaded for it, and its texts are read
        model = await self._model(request, asked.model, Embedder, size)
        asked.check(model.dimensions)
        dimensions = asked.dimensions or model.dimensions
        numbers, most = len(asked.texts) * dimensions, MAX_JSON_BYTES // (4 * dimensions)
        if len(asked.texts) > most:
            given, expected = Raw(f"{len(asked.texts)} texts"), f"at most {most} for {dimensions} numbers each"
            raise InvalidRequest(f"{asked.field} of body", given=given, expected=expected, fix=SEVERAL)
        rows = await self._prepared(request, size, partial(_texts_of, model, asked))
        values = await unless_gone(request, self._values(model, rows, asked.parameters, deadline))
        return await self._written(numbers, partial(asked.body, values, _total(rows), model.model.name))

    async def _ranked(self, request: Request, asked: Ranking, size: int, deadline: float | None) -> Response:
        self._service.admit()
        model = await self._model(request, asked.model, Reranker, size)
        size += len(asked.query.encode()) * len(asked.texts)
        if size > MAX_JSON_BYTES:  # the query is read once for each text
            given, expected = Raw(f"{size} bytes with the query beside each text"), f"at most {MAX_JSON_BYTES}"
            raise InvalidRequest(f"{asked.field} of body", given=given, expected=expected, fix=SEVERAL)
        rows = await self._prepared(request, size, partial(_pairs_of, model, asked))
        values = await unless_gone(request, self._values(model, rows, asked.parameters, deadline))
        return await self._written(size, partial(asked.body, values[:, 0], _total(rows), model.model.name))

    async def _model(self, request: Request, name: str, kind: type[M], size: int) -> M:
        models = self._models
        return await unless_gone(request, models.find(name, kind, size) if name else models.only(kind, size))

    async def _read(self, request: Request, read: Callable[[Mapping[str, Any]], T]) -> tuple[T, int]:
        body = await self._endpoints.body(request)
        return await read_body(request, body, self._service.threads, read), len(body)

    async def _prepared(
        self, request: Request, size_bytes: int, prepare: Callable[[Callable[[], None]], list[Tokens]]
    ) -> list[Tokens]:
        """Return the tokens of all texts, which are made on a thread that stops when the client has gone."""
        gone = threading.Event()

        def go_on() -> None:
            if gone.is_set():
                raise ClientDisconnect

        try:
            return await unless_gone(request, self._service.threads.run(size_bytes, partial(prepare, go_on)))
        finally:
            gone.set()

    async def _values(
        self, model: Embedder | Reranker, rows: list[Tokens], parameters: dict[str, Any], deadline: float | None
    ) -> Array:
        """Return the output for all rows, computed in runs of rows of similar length; raise a RunnerError for a NaN.

        Rows are padded for their run alone: one long text would make those of a whole request as long.
        """
        output, lengths = model.output, np.array([len(row.ids) for row in rows])
        order = np.argsort(lengths, kind="stable")
        runs = list(_runs(lengths[order], model.model.manifest.max_batch_size))
        values: dict[int, Array] = {}

        def requests() -> Iterator[UncheckedRequest]:
            for number, run in enumerate(runs):
                inputs = model.step.padded([rows[row] for row in order[run]])
                tensors = [InputTensor(name, "INT64", tuple(part.shape), {}, part) for name, part in inputs.items()]
                given = parameters_of(parameters, "the request")
                outputs = [RequestedOutput(output, {})]
                yield UncheckedRequest(model.model.name, model.model.version, str(number), given, tensors, outputs)

        async def add(response: InferResponse, final: bool) -> None:
            values[int(response.id)] = response.outputs[output]

        try:
            await self._streams.answer_all(requests(), add, _RUNS, deadline)
        except Overloaded as error:
            if error.cause != "deadline" or not values:
                raise
            # Some runs were in time, so that there are too many for the deadline, and to repeat them would not help.
            given, expected = Raw(f"{len(values)} of {len(runs)} runs"), "all of them before the deadline"
            raise DeadlineExceeded("request", given=given, expected=expected, fix=SEVERAL) from None
        joined: Array = np.concatenate([values[number] for number in range(len(runs))])
        if not np.isfinite(joined).all():  # which JSON cannot hold
            subject, given = f"output {output!r} of {model.model.name!r}", Raw("a NaN or an infinity")
            fix = "The usual cause is FP16; `fewheads infer` shows the output of each text."
            raise RunnerError(subject, given=given, expected="finite numbers", fix=fix)
        return joined[np.argsort(order)]

    async def _written(self, size: int, write: Callable[[], bytes]) -> Response:
        content = write() if size <= _INLINE_NUMBERS else await self._service.threads.run(0, write, accepted=True)
        return Response(content, media_type="application/json")


def _texts_of(model: Embedder, asked: Embeddings, go_on: Callable[[], None]) -> list[Tokens]:
    if isinstance(asked.texts[0], str):
        return model.step.tokens(_column(asked.texts), go_on=go_on)
    return model.step.given(asked.texts, f"{asked.field} of body")


def _pairs_of(model: Reranker, asked: Ranking, go_on: Callable[[], None]) -> list[Tokens]:
    return model.step.tokens(_column([asked.query] * len(asked.texts)), _column(asked.texts), go_on=go_on)


def _total(rows: list[Tokens]) -> int:
    return sum(len(row.ids) for row in rows)


def _column(texts: list[Any]) -> Array:
    column = np.empty((len(texts), 1), np.object_)
    column[:, 0] = [text.encode() for text in texts]
    return column


def _runs(lengths: Array, most_rows: int) -> Iterator[slice]:
    """Yield the rows of each run, of rows in the order of their lengths."""
    start = 0
    for end in range(1, len(lengths) + 1):
        full = end - start == most_rows
        if end == len(lengths) or full or (end + 1 - start) * lengths[end] > _RUN_TOKENS:
            yield slice(start, end)
            start = end
