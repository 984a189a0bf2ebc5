"""Streams of requests: many on one connection, each answered in its turn."""

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

#: Requests of one stream that are on their way: read, and their answers not yet taken by the client. While they are so
#: many nothing more is read, and the transport's flow control makes the client wait. So a client that does not read
#: costs this much and no more.
MAX_IN_FLIGHT: Final = 32
#: What clients read of a call that the end of the server cuts short.
DRAINING: Final = "the server is going down and takes no further request"

_Answer = asyncio.Task[pb.ModelStreamInferResponse]
#: Returns the next request; None when there will be no other. Raises :class:`Unparseable`.
Read = Callable[[], Awaitable[pb.ModelInferRequest | None]]
Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class Unparseable(Exception):
    """A message is not the protobuf of the method. Nothing that follows it can be trusted to belong to it."""


class Draining(Exception):
    """The server is going down and takes no further request."""


class Streams:
    """Answers streams.

    Args:
        service: answers the single requests.

    Attributes:
        open: how many streams there are.
        in_flight: how many of their requests are on their way.
    """

    def __init__(self, service: InferenceService) -> None:
        self.open = 0
        self.in_flight = 0
        self._service = service
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Read no further request from any stream; each ends when those that were read are answered."""
        self._draining.set()

    async def answer(self, read: Read, write: Write, deadline: float | None) -> None:
        """Answer one stream, in the order of its requests. Cancelling this drops all of them.

        An error affects only its own request and is returned in the response to it.

        Args:
            read: gives the requests.
            write: takes the responses, and waits while the client cannot take more.
            deadline: of the whole stream, in ``time.monotonic()`` seconds; None if it may stay for ever.

        Raises:
            Unparseable: a message was none, and the requests before it have been answered.
            Draining: the server goes down, and the requests that were read have been answered.
        """
        # The one that is being written and the one that waits for room in the queue are on their way too.
        turns: asyncio.Queue[_Answer | None] = asyncio.Queue(MAX_IN_FLIGHT - 2)
        running: set[_Answer] = set()
        reader = asyncio.create_task(self._read(read, deadline, turns, running))
        self.open += 1
        try:
            while (answer := await turns.get()) is not None:
                await write(await answer)
                running.discard(answer)
                self.in_flight -= 1
            await reader  # raises why the stream ended, unless the client ended it
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
        except Exception as error:  # not when it is cancelled: nobody would make room for the end then
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
    if draining.done():  # the next request of a client that never pauses is here at once, every time
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
