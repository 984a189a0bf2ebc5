"""One call on a stream: its messages, its end, and the context for its handler."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from edge import errors
from edge.connections.quota import Share
from edge.http2.messages import (
    SMALL_BYTES,
    CallMetadata,
    Field,
    Messages,
    Packed,
    RequestHeader,
    no_room,
    read_metadata,
)
from edge.rpc.methods import UNPARSEABLE, Refused, Status
from edge.serving.statuses import Code

log = logging.getLogger(__name__)

#: A request up to this size is acknowledged at the end of its call, with the response.
_LATE_BYTES = 16 * 1024
#: What a message of a stream costs beside its bytes, until its handler reads it.
_MESSAGE_BYTES = 64
#: The end of a call whose client does not read what it is sent.
UNREAD = (
    Code.RESOURCE_EXHAUSTED,
    "response: got one that exceeds what the connection may have unread, expected less. Read responses as they come.",
)
_OK = Code.OK
_INTERNAL = Code.INTERNAL


class Direct(NamedTuple):
    """A unary method without a coroutine.

    ``start`` takes the request, the context of the call, and a callback for the response or the
    :class:`edge.rpc.methods.Status`; it returns the argument for ``cancel``, or None if the call has ended.
    """

    start: Callable[[Any, Any, Callable[[Any], None]], Any]
    cancel: Callable[[Any], None]


class Route(NamedTuple):
    """How to answer a call."""

    handler: Any  # the :class:`edge.rpc.methods.Method`, or None for a refused call
    max_bytes: int = 0  # the limit for its requests
    direct: Direct | None = None  # the direct method that replaces it, if any
    # Whether the success of the call shows that its connection is of a client that the server wants: it is false for
    # methods that need no token, where the others do.
    proves: bool = False


class _Wire(Protocol):
    """The connection as its calls see it. No method raises, even on a closed connection."""

    @property
    def peer(self) -> str: ...
    def acknowledge(self, stream_id: int, size: int) -> None: ...
    def send(self, stream_id: int, message: bytes) -> bool: ...
    def respond(self, stream_id: int, message: bytes) -> None: ...
    def finish(self, stream_id: int, code: Code, details: str, metadata: CallMetadata) -> None: ...
    def room(self, stream_id: int) -> Awaitable[None] | None: ...


class Rpc:
    """One call. Its handler starts with the request, runs in ``context``, and is cancelled with the call.

    For the handler, this is the part of ``grpc.aio.ServicerContext`` that our servicers use. ``route`` is None for a
    refused call. ``deadline`` is in ``time.monotonic()`` seconds, infinite without one.
    """

    __slots__ = (
        *("_call", "_charged", "_context", "_direct", "_fields", "_handler", "_inbox", "_messages"),
        *("_reader", "_share", "_task", "_wire", "deadline", "done", "held", "proves", "request_ended", "stream_id"),
    )

    def __init__(
        self,
        wire: _Wire,
        stream_id: int,
        route: Route | None,
        head: RequestHeader,
        fields: Iterable[Field],
        share: Share,
        charged: int,
        context: Context,
    ) -> None:
        self.stream_id = stream_id
        self.proves = route is not None and route.proves
        self._share = share
        self._charged = charged  # bytes of the connection's share
        self.held = 0  # bytes received and not yet acknowledged
        self.request_ended = False
        self.done = route is None  # the status is sent, or the stream is closed
        self._wire, self._context = wire, context
        self._handler, max_bytes, self._direct, _ = route or Route(None)
        self._call: Any = None
        self._fields = fields
        self._messages = Messages(max_bytes, head.encoding)
        self._inbox: deque[bytes | Packed] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.deadline = math.inf if head.timeout is None else time.monotonic() + head.timeout
        if not self.done and self._handler.request_streaming:
            self._start(self)

    # Called by the connection.

    @property
    def unfinished(self) -> bool:
        """Whether a request that should come at once has not arrived."""
        return not (self.done or self.request_ended or self._handler.request_streaming)

    @property
    def received_bytes(self) -> int:
        """The bytes of its incomplete message."""
        return self._messages.size

    def too_slow(self) -> None:
        """End the call, because its request does not arrive."""
        self._cut(Code.DEADLINE_EXCEEDED, "the request did not arrive in time. Send it faster.")

    def receive(self, data: bytes, ended: bool) -> None:
        """Process bytes of the request; ``ended`` says whether they are the last."""
        self.held += len(data)
        if self.done:
            return  # without acknowledgement, so that flow control stops a client that goes on
        try:
            if data:
                messages = self._messages.feed(data, self._hold)
                if self._handler.request_streaming and messages and not self._hold(sum(map(_extra, messages))):
                    raise no_room(len(data))
                self._inbox.extend(messages)
            if ended and self._messages.begun:
                raise Refused(_INTERNAL, "the request ends in the middle of a message")
            self.request_ended = ended
            if self._handler.request_streaming:
                if self._reader and not self._reader.done():
                    self._reader.set_result(None)
            elif len(self._inbox) > 1 or (ended and not self._inbox):
                details = f"request: got {len(self._inbox)} messages, expected 1. Send exactly one, then end it."
                raise Refused(_INTERNAL, details)
        except Refused as refused:
            self._cut(*refused.status)
            return
        if self._handler.request_streaming:
            if not self._inbox:
                self._acknowledge()
        elif not ended or self.held > _LATE_BYTES:
            self._acknowledge()
        if ended and not self._handler.request_streaming:
            message = self._inbox.popleft()
            if isinstance(message, Packed):
                self._task = asyncio.get_running_loop().create_task(self._answer_packed(message))
            else:
                self._answer(message)

    def close(self) -> None:
        """Cancel the call, and release what it holds: its stream is closed."""
        self._acknowledge()
        self._cancel()
        self._end()
        self._share.release(self._charged)
        self._charged = 0

    async def stop(self) -> None:
        """Cancel the call for a shutdown, and wait for its handler."""
        self._cut(Code.UNAVAILABLE, "the server is going down")
        if self._task:
            await asyncio.wait([self._task])

    # Methods of grpc.aio.ServicerContext, for the handler.

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None without a deadline."""
        return None if self.deadline == math.inf else max(self.deadline - time.monotonic(), 0.0)

    def invocation_metadata(self) -> CallMetadata:
        return read_metadata(self._fields)

    def peer(self) -> str:
        return self._wire.peer

    async def read(self) -> Any:
        """Return the next request, or the Status that refuses its bytes; None after the last one."""
        while not self._inbox:
            if self.request_ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._inbox.popleft()
        if not self._inbox:
            self._acknowledge()
        before = self._charged
        try:
            data = await message.inflated(self._hold) if isinstance(message, Packed) else message
        except Refused as refused:
            return refused.status
        finally:
            self._let_go(self._charged - before + _size(message) + _extra(message))
        return self._handler.parse(data)

    async def write(self, response: Any) -> None:
        """Send a response, and wait until there is room for the next."""
        self._send(response)
        while not self.done and (room := self._wire.room(self.stream_id)):
            await room

    # Execution of the handler.

    async def _answer_packed(self, packed: Packed) -> None:
        try:
            message = await packed.inflated(self._hold)
        except Refused as refused:
            self._finish(*refused.status)
        else:
            self._task = None
            self._answer(message)

    def _answer(self, message: bytes) -> None:
        try:
            request = self._handler.parse(message)
            if self._direct:
                self._call = self._context.run(self._direct.start, request, self, self._respond_once)
            else:
                self._start(request)
        except Exception as error:
            self._fail(error)

    def _respond_once(self, outcome: Any) -> None:
        self._call = None
        if self.done:
            return
        if isinstance(outcome, Status):
            self._finish(*outcome)
            return
        try:
            message = self._handler.serialize(outcome)
        except Exception as error:
            self._fail(error)
            return
        self._end()
        self._wire.respond(self.stream_id, message)

    async def _run(self, request: Any) -> None:
        try:
            response = await self._handler.answer(request, self)
            del request
            if response is not None and not self.done:
                self._send(response)
        except (Exception, asyncio.CancelledError) as error:
            self._fail(error)
        else:
            self._finish(_OK, "")

    def _send(self, response: Any) -> None:
        if not self._wire.send(self.stream_id, self._handler.serialize(response)):
            self._cut(*UNREAD)

    def _start(self, request: Any) -> None:
        self._task = self._context.run(asyncio.get_running_loop().create_task, self._run(request))

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._finish(Code.CANCELLED, "the call was cancelled")
        elif isinstance(error, DecodeError):
            self._finish(_INTERNAL, UNPARSEABLE)
        elif isinstance(error, Refused):
            self._finish(*error.status)
        else:
            log.error("a call failed", exc_info=error)
            self._finish(_INTERNAL, errors.INTERNAL)

    def expire(self) -> None:
        """End the call at its deadline."""
        self._cut(Code.DEADLINE_EXCEEDED, "the deadline of the call passed")

    def _cut(self, code: Code, details: str, metadata: CallMetadata = ()) -> None:
        """End the call and cancel its handler."""
        self._finish(code, details, metadata)  # first, because a task that has not started sees no cancellation
        self._cancel()

    def _cancel(self) -> None:
        if self._task:
            self._task.cancel()
        if self._call is not None and self._direct:
            self._direct.cancel(self._call)
            self._call = None

    def _finish(self, code: Code, details: str, metadata: CallMetadata = ()) -> None:
        if not self.done:
            self._end()
            self._wire.finish(self.stream_id, code, details, metadata)

    def _end(self) -> None:
        self.done = True
        self._inbox.clear()

    def _hold(self, size: int) -> bool:
        held = self._share.hold(size)
        if held:
            self._charged += size
        return held

    def _let_go(self, size: int) -> None:
        if self._charged:  # otherwise the stream is closed, and its handler ends
            self._charged -= size
            self._share.release(size)

    def _acknowledge(self) -> None:
        if self.held:
            self._wire.acknowledge(self.stream_id, self.held)
            self.held = 0


def _size(message: bytes | Packed) -> int:
    """Return what was held for a message when its size was announced."""
    size = len(message.data if isinstance(message, Packed) else message)
    return size if size > SMALL_BYTES else 0


def _extra(message: bytes | Packed) -> int:
    """Return what a message of a stream costs beside that."""
    size = len(message.data if isinstance(message, Packed) else message)
    return _MESSAGE_BYTES if size > SMALL_BYTES else _MESSAGE_BYTES + size
