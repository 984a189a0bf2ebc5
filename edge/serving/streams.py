"""ModelStreamInfer: many requests on one stream, answered in their order; and the requests of one call over HTTP.

A request for partial answers gets a response for each of them, and all of its responses as soon as they are there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from edge.errors import INTERNAL, Overloaded, RequestError
from edge.pb import inference_pb2 as pb
from edge.protocol import FINAL_RESPONSE, STREAM_PARTIAL, STREAM_RETRY_AFTER_MS
from edge.serving.call import Call
from edge.serving.inference import InferenceService
from edge.serving.request import MOST_NAME_CHARS

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Requests of one stream that were read and whose responses the client has not taken yet. At this limit the server
#: reads no more, and flow control makes the client wait, so a client that does not read costs no more than this.
MAX_IN_FLIGHT: Final = 32
#: The status message of calls that the shutdown ends.
DRAINING: Final = "the server is going down and takes no further request"

#: Returns the next request, or None at the end. May raise an error that ends the stream.
Read = Callable[[], Awaitable[pb.ModelInferRequest | None]]
#: Sends a response, and waits while the client cannot take more.
Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class Draining(Exception):
    """The server is shutting down and reads no further request."""


class _Exchange:
    """One request of a stream, and its responses."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once  # whether to send responses as they come, as for partial answers, or in their order
        self.call: Call | None = None  # once it has had a partial answer
        self.final: pb.ModelStreamInferResponse | Exception | None = None  # an error is raised
        self.task: asyncio.Task[None]


class _Outbox:
    """The exchanges of one stream, and those that have something to send, in turns.

    Args:
        together: whether the first error is raised, or each one sent in place of its response.
    """

    def __init__(self, *, together: bool = False) -> None:
        self.together = together
        self.room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.running: set[_Exchange] = set()
        self.ready: asyncio.Queue[_Exchange | None] = asyncio.Queue()  # None after the last request
        self._order: deque[_Exchange] = deque()  # without partial answers, and not ready

    def add(self, exchange: _Exchange) -> None:
        """Add the exchange of the next request."""
        self.running.add(exchange)
        if not exchange.at_once:
            self._order.append(exchange)

    def progressed(self, exchange: _Exchange, call: Call) -> None:
        """Send the partial answers of an exchange."""
        exchange.call = call
        self.ready.put_nowait(exchange)

    def answered(self, exchange: _Exchange, final: pb.ModelStreamInferResponse | Exception) -> None:
        """Send the last response of an exchange, or raise its error: at once, or in the order of the requests."""
        exchange.final = final
        if exchange.at_once:
            self.ready.put_nowait(exchange)
        while self._order and self._order[0].final:
            self.ready.put_nowait(self._order.popleft())


class Streams:
    """Answers streams. Once ``draining`` is set, each one ends after its requests so far are answered."""

    def __init__(self, service: InferenceService, draining: asyncio.Event) -> None:
        self.open = 0  # streams
        self.in_flight = 0  # their requests in progress
        self._service = service
        self._draining = draining

    async def answer(self, read: Read, write: Write, deadline: float | None) -> None:
        """Answer one stream. Cancelling this cancels all of its requests.

        An error affects only its own request and is returned in the response to it. ``deadline`` is the stream's, in
        ``time.monotonic()`` seconds. Draining, and an error of ``read``, are raised once the requests so far are
        answered.
        """
        outbox = _Outbox()
        await self._answer(self._read(read, deadline, outbox), write, outbox)

    async def answer_all(self, requests: Iterable[pb.ModelInferRequest], write: Write) -> None:
        """Answer requests that belong together, as the answers come. Cancelling this cancels all of them.

        The first error is raised, and cancels the other requests. A shutdown does not stop this.
        """
        outbox = _Outbox(together=True)
        await self._answer(self._begin_all(requests, outbox), write, outbox)

    async def _answer(self, reading: Coroutine[Any, Any, None], write: Write, outbox: _Outbox) -> None:
        reader, ended = asyncio.create_task(reading), False
        self.open += 1
        try:
            while outbox.running or not ended:
                exchange = await outbox.ready.get()
                if exchange is None:
                    ended = True
                elif exchange in outbox.running:
                    await self._send(exchange, outbox, write)
            await reader  # raises the reason for the end, unless the client ended the stream
        finally:
            self.in_flight -= len(outbox.running)
            try:
                await _cancel([reader, *(exchange.task for exchange in outbox.running)])
            finally:
                self.open -= 1

    async def _send(self, exchange: _Exchange, outbox: _Outbox, write: Write) -> None:
        """Send the next partial answer of an exchange that has one, or else its last response."""
        so_far = self._service.partial(exchange.call) if exchange.call else None
        if so_far:
            response = pb.ModelStreamInferResponse(infer_response=so_far)
            response.infer_response.parameters[FINAL_RESPONSE].bool_param = False
            await write(response)
            outbox.ready.put_nowait(exchange)  # the others first
            await asyncio.sleep(0)  # more answers may come all the time, and other streams have to go on
        elif isinstance(exchange.final, Exception):
            error, exchange.final = exchange.final, None  # its traceback refers to frames that refer to the exchange
            try:
                raise error
            finally:
                del error
        elif exchange.final:
            await write(exchange.final)
            outbox.running.discard(exchange)
            self.in_flight -= 1
            outbox.room.release()

    async def _read(self, read: Read, deadline: float | None, outbox: _Outbox) -> None:
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            while await outbox.room.acquire() and (request := await _until(draining, read)) is not None:
                streams = STREAM_PARTIAL in request.parameters and request.parameters[STREAM_PARTIAL].bool_param
                self._begin(request, deadline, _Exchange(streams), outbox)
        finally:
            draining.cancel()
            outbox.ready.put_nowait(None)

    async def _begin_all(self, requests: Iterable[pb.ModelInferRequest], outbox: _Outbox) -> None:
        try:
            for request in requests:
                await outbox.room.acquire()
                self._begin(request, None, _Exchange(at_once=True), outbox)
                await asyncio.sleep(0)  # so that one which is refused at once ends this
        finally:
            outbox.ready.put_nowait(None)

    def _begin(
        self, request: pb.ModelInferRequest, deadline: float | None, exchange: _Exchange, outbox: _Outbox
    ) -> None:
        exchange.task = asyncio.create_task(self._infer(request, deadline, exchange, outbox))
        outbox.add(exchange)
        self.in_flight += 1

    async def _infer(
        self, request: pb.ModelInferRequest, deadline: float | None, exchange: _Exchange, outbox: _Outbox
    ) -> None:
        response = pb.ModelStreamInferResponse()
        request_id = request.id[:MOST_NAME_CHARS]
        try:
            told = partial(outbox.progressed, exchange)
            response.infer_response.CopyFrom(await self._service.infer(request, deadline, told))
        except Exception as error:
            if outbox.together:
                outbox.answered(exchange, error)
                return
            _describe(error, response, request, request_id)
        response.infer_response.parameters[FINAL_RESPONSE].bool_param = True
        outbox.answered(exchange, response)


def _describe(
    error: Exception, response: pb.ModelStreamInferResponse, request: pb.ModelInferRequest, request_id: str
) -> None:
    """Make a response tell of an error; one that is not expected goes to the log."""
    answer = response.infer_response
    name, version = request.model_name[:MOST_NAME_CHARS], request.model_version[:MOST_NAME_CHARS]
    answer.id, answer.model_name, answer.model_version = request_id, name, version
    if not isinstance(error, RequestError):
        log.error("a request of a stream failed", exc_info=error)
        response.error_message = INTERNAL
        return
    log.debug("request %r of a stream to %r: %s", request_id, name, error)
    response.error_message = str(error)
    if isinstance(error, Overloaded) and error.retry_after_ms:
        answer.parameters[STREAM_RETRY_AFTER_MS].int64_param = error.retry_after_ms


async def _until(draining: asyncio.Future[Any], read: Callable[[], Awaitable[T]]) -> T:
    if draining.done():  # a client that never pauses always has a next request
        raise Draining
    reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait({reading, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise Draining
        return reading.result()
    finally:
        if not reading.done():
            await _cancel([reading])


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
