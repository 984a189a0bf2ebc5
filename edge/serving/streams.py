"""ModelStreamInfer: many requests on one stream, answered in their order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from edge.errors import INTERNAL, Overloaded, RequestError
from edge.pb import inference_pb2 as pb
from edge.protocol import FINAL_RESPONSE, STREAM_RETRY_AFTER_MS
from edge.serving.inference import InferenceService

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Requests of one stream that were read and whose responses the client has not taken yet. At this limit the server
#: reads no more, and flow control makes the client wait, so a client that does not read costs no more than this.
MAX_IN_FLIGHT: Final = 32
#: The status message of calls that the shutdown ends.
DRAINING: Final = "the server is going down and takes no further request"

_Answer = asyncio.Task[pb.ModelStreamInferResponse]
#: Returns the next request, or None at the end. Raises :class:`Unparseable`.
Read = Callable[[], Awaitable[pb.ModelInferRequest | None]]
#: Sends a response, and waits while the client cannot take more.
Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class Unparseable(Exception):
    """A message is not a ModelInferRequest, so the rest of its stream cannot be trusted."""


class Draining(Exception):
    """The server is shutting down and reads no further request."""


class Streams:
    """Answers streams."""

    def __init__(self, service: InferenceService) -> None:
        self.open = 0  # streams
        self.in_flight = 0  # their requests in progress
        self._service = service
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Stop reading; each stream ends once its requests so far are answered."""
        self._draining.set()

    async def answer(self, read: Read, write: Write, deadline: float | None) -> None:
        """Answer one stream, in the order of its requests. Cancelling this cancels all of them.

        An error affects only its own request and is returned in the response to it. ``deadline`` is the stream's, in
        ``time.monotonic()`` seconds. Unparseable and Draining are raised once the requests so far are answered.
        """
        # Two more are in flight: the response being written, and the request that waits for room in the queue.
        turns: asyncio.Queue[_Answer | None] = asyncio.Queue(MAX_IN_FLIGHT - 2)
        running: set[_Answer] = set()
        reader = asyncio.create_task(self._read(read, deadline, turns, running))
        self.open += 1
        try:
            while (answer := await turns.get()) is not None:
                await write(await answer)
                running.discard(answer)
                self.in_flight -= 1
            await reader  # raises the reason for the end, unless the client ended the stream
        finally:
            self.in_flight -= len(running)
            try:
                await _cancel({reader, *running})
            finally:
                self.open -= 1

    async def _read(
        self, read: Read, deadline: float | None, turns: asyncio.Queue[_Answer | None], running: set[_Answer]
    ) -> None:
        draining = asyncio.ensure_future(self._draining.wait())
        ended: Exception | None = None
        try:
            while (request := await _until(draining, read)) is not None:
                answer = asyncio.create_task(self._infer(request, deadline))
                running.add(answer)
                self.in_flight += 1
                await turns.put(answer)
        except Exception as error:  # not a cancellation, after which nobody would make room for the end
            ended = error
        finally:
            draining.cancel()
        await turns.put(None)
        if ended:
            raise ended

    async def _infer(self, request: pb.ModelInferRequest, deadline: float | None) -> pb.ModelStreamInferResponse:
        response = pb.ModelStreamInferResponse()
        request_id = request.id
        try:
            response.infer_response.CopyFrom(await self._service.infer(request, deadline))
        except RequestError as error:
            log.debug("request %r of a stream to %r: %s", request_id, request.model_name, error)
            response.error_message = str(error)
            if isinstance(error, Overloaded) and error.retry_after_ms:
                response.infer_response.parameters[STREAM_RETRY_AFTER_MS].int64_param = error.retry_after_ms
        except Exception:
            log.exception("a request of a stream failed")
            response.error_message = INTERNAL
        if response.error_message:
            response.infer_response.id = request_id
            response.infer_response.model_name = request.model_name
            response.infer_response.model_version = request.model_version
        response.infer_response.parameters[FINAL_RESPONSE].bool_param = True
        return response


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
