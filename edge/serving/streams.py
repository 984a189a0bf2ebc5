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
from edge.serving.call import Call, Encoder, InferResponse, MessageEncoder
from edge.serving.inference import InferenceService
from edge.serving.request import MOST_NAME_CHARS, UncheckedRequest
from edge.serving.waiting import Waiting

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Requests of one stream that were read and whose responses the client has not taken yet. At this limit the server
#: reads no more, and flow control makes the client wait, so a client that does not read costs no more than this.
MAX_IN_FLIGHT: Final = 32
#: The status message of calls that the shutdown ends.
DRAINING: Final = "the server is going down and takes no further request"

#: Returns the next request, or None at the end. May raise an error that ends the stream.
Read = Callable[[], Awaitable[pb.ModelInferRequest | None]]
#: Sends a message, and waits while the client cannot take more.
WriteMessage = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]
#: Sends a response, and whether it is the last one to its request, and waits while the client cannot take more.
WriteResponse = Callable[[InferResponse, bool], Awaitable[None]]


class Draining(Exception):
    """The server is shutting down and reads no further request."""


class _StreamedRequest:
    """One request of a stream, and its responses."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once  # whether to send responses as they come, as for partial answers, or in their order
        self.call: Call | Waiting | None = None  # while it is in progress
        self.final: Any = None  # the last response; an error is raised


class _Outbox:
    """The requests of one stream, and those that have something to send, in turns."""

    def __init__(self, encoder: Encoder, in_flight: int = MAX_IN_FLIGHT) -> None:
        self.encoder = encoder
        self.room = asyncio.Semaphore(in_flight)
        self.running: set[_StreamedRequest] = set()
        self.ready: asyncio.Queue[_StreamedRequest | None] = asyncio.Queue()  # None after the last request
        self._order: deque[_StreamedRequest] = deque()  # without partial answers, and not ready

    def add(self, streamed: _StreamedRequest) -> None:
        self.running.add(streamed)
        if not streamed.at_once:
            self._order.append(streamed)

    def answered(self, streamed: _StreamedRequest, final: Any) -> None:
        """Send the last response to a request, or raise its error: at once, or in the order of the requests."""
        streamed.final = final
        if streamed.at_once:
            self.ready.put_nowait(streamed)
        while self._order and self._order[0].final:
            self.ready.put_nowait(self._order.popleft())


class Streams:
    """Answers streams. Once ``draining`` is set, each one ends after its requests so far are answered."""

    def __init__(self, service: InferenceService, draining: asyncio.Event) -> None:
        self.open = 0  # streams
        self.in_flight = 0  # their requests in progress
        self._service, self._draining = service, draining

    async def answer(self, read: Read, write: WriteMessage, deadline: float | None) -> None:
        """Answer one stream. Cancelling this cancels all of its requests. ``deadline`` is in ``time.monotonic()``
        seconds.

        An error is returned in the response to its own request. Draining, and an error of ``read``, are raised once the
        requests so far are answered.
        """

        async def write_message(message: pb.ModelStreamInferResponse, final: bool) -> None:
            message.infer_response.parameters[FINAL_RESPONSE].bool_param = final
            await write(message)

        outbox = _Outbox(MessageEncoder(stream=True))
        await self._answer(self._read(read, deadline, outbox), write_message, outbox)

    async def answer_all(
        self,
        requests: Iterable[UncheckedRequest],
        write: WriteResponse,
        in_flight: int = MAX_IN_FLIGHT,
        deadline: float | None = None,
    ) -> None:
        """Answer requests that belong together, as the answers come; so many at a time. Cancelling this cancels all.

        ``deadline`` is that of all of them together, as in :meth:`answer`; the caller cancels this then.

        The caller has admitted the first one. The others count in its rate, and are not refused for it: the client sent
        one request, and can't know how many it becomes.
        The first error is raised, and cancels the other requests. A shutdown does not stop this.
        """
        outbox = _Outbox(Encoder(), in_flight)
        await self._answer(self._begin_all(requests, deadline, outbox), write, outbox)

    async def _answer(
        self, reading: Coroutine[Any, Any, None], write: Callable[[Any, bool], Awaitable[None]], outbox: _Outbox
    ) -> None:
        reader, ended = asyncio.create_task(reading), False
        self.open += 1
        try:
            while outbox.running or not ended:
                streamed = await outbox.ready.get()
                if streamed is None:
                    ended = True
                elif streamed in outbox.running:
                    await self._send(streamed, outbox, write)
            await reader  # raises the reason for the end, unless the client ended the stream
        finally:
            self.in_flight -= len(outbox.running)
            for streamed in outbox.running:
                self._service.cancel(streamed.call)
            try:
                await _cancel(reader)
            finally:
                self.open -= 1

    async def _send(
        self, streamed: _StreamedRequest, outbox: _Outbox, write: Callable[[Any, bool], Awaitable[None]]
    ) -> None:
        """Send the next partial answer to a request that has one, or else its last response."""
        if streamed.call and (response := self._service.partial(streamed.call)):
            await write(response, False)
            outbox.ready.put_nowait(streamed)  # the others first
            await asyncio.sleep(0)  # more answers may come all the time, and other streams have to go on
        elif isinstance(streamed.final, Exception):
            error, streamed.final = streamed.final, None  # its traceback refers to frames that refer to the request
            try:
                raise error
            finally:
                del error
        elif streamed.final:
            await write(streamed.final, True)
            outbox.running.discard(streamed)
            self.in_flight -= 1
            outbox.room.release()

    async def _read(self, read: Read, deadline: float | None, outbox: _Outbox) -> None:
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            while await outbox.room.acquire() and (request := await _until(draining, read)) is not None:
                streams = STREAM_PARTIAL in request.parameters and request.parameters[STREAM_PARTIAL].bool_param
                names = [name[:MOST_NAME_CHARS] for name in (request.id, request.model_name, request.model_version)]
                streamed = _StreamedRequest(streams)
                self._begin(request, deadline, streamed, outbox, partial(_answer_with_message, outbox, streamed, names))
        finally:
            draining.cancel()
            outbox.ready.put_nowait(None)

    async def _begin_all(self, requests: Iterable[UncheckedRequest], deadline: float | None, outbox: _Outbox) -> None:
        try:
            for number, request in enumerate(requests):
                await outbox.room.acquire()
                if number:
                    self._service.admit(refuse=False)
                streamed = _StreamedRequest(at_once=True)
                self._begin(request, deadline, streamed, outbox, partial(outbox.answered, streamed), admitted=True)
                await asyncio.sleep(0)  # so that one which is refused at once ends this
        finally:
            outbox.ready.put_nowait(None)

    def _begin(
        self,
        request: pb.ModelInferRequest | UncheckedRequest,
        deadline: float | None,
        streamed: _StreamedRequest,
        outbox: _Outbox,
        reply: Callable[[Any], None],
        *,
        admitted: bool = False,
    ) -> None:
        outbox.add(streamed)
        self.in_flight += 1
        on_partial = partial(outbox.ready.put_nowait, streamed)
        streamed.call = self._service.start(request, deadline, reply, outbox.encoder, on_partial, admitted=admitted)


def _answer_with_message(outbox: _Outbox, streamed: _StreamedRequest, names: list[str], outcome: Any) -> None:
    """Answer a request of a client with a message, also if it failed; an unexpected error goes to the log."""
    if isinstance(outcome, Exception):
        error, outcome = outcome, pb.ModelStreamInferResponse()
        answer = outcome.infer_response
        answer.id, answer.model_name, answer.model_version = names
        if not isinstance(error, RequestError):
            log.error("a request of a stream failed", exc_info=error)
            outcome.error_message = INTERNAL
        else:
            log.debug("request %r of a stream to %r: %s", names[0], names[1], error)
            outcome.error_message = str(error)
            if isinstance(error, Overloaded) and error.retry_after_ms:
                answer.parameters[STREAM_RETRY_AFTER_MS].int64_param = error.retry_after_ms
        del error  # its traceback may refer to this frame
    outbox.answered(streamed, outcome)


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
            await _cancel(reading)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
