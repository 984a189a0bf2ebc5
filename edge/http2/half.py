"""The sending half of a connection of HTTP/2: the answers of its calls, until their client has read them."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from contextlib import suppress
from typing import Final

import ngh2

from edge.connections.quota import Share
from edge.http2.connection_limits import ConnectionLimits, UnreadAnswers
from edge.http2.messages import prefix
from edge.http2.metadata import OK_TRAILERS, RESPONSE, Metadata, trailers
from edge.http2.rpc import UNREAD, Rpc
from edge.serving.statuses import Code

log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 256 * 1024
#: The queued bytes of a stream above which its handler waits for the client.
_WAITING_BYTES: Final = 64 * 1024
#: A message above this size is sent without a copy behind its prefix.
_COPIED_BYTES: Final = 16 * 1024

#: A call may use a stream or connection that has just ended.
if_open = suppress(ngh2.NGH2Error)


class SendingHalf(asyncio.Protocol):
    """What a connection sends, and what its client has not read of it."""

    _transport: asyncio.Transport
    _time_limits: ConnectionLimits

    def __init__(self, http2: ngh2.Connection, share: Share) -> None:
        self._http2 = http2
        self._share = share
        self._rpcs: dict[int, Rpc] = {}
        self._begun: set[int] = set()  # streams whose response has begun
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._answered_early: set[int] = set()  # streams whose response has ended and whose request has not
        self._unread = UnreadAnswers(share)
        self._open = False
        self._paused = False
        self._flushing = False
        self._receiving = False
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def _handle(self, events: list[ngh2.Event]) -> None:
        """Process what the protocol has found."""

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    # Answers of calls.

    def send(self, stream_id: int, message: bytes) -> bool:
        """Send a message; False if the client has too many unread ones."""
        if not self._unread.take(len(message)):
            return False
        with if_open:
            if stream_id not in self._begun:
                self._begun.add(stream_id)
                self._http2.send_response(stream_id, RESPONSE)
                self._time_limits.response_sent()
            self._queue(stream_id, message)
            self._flush_soon()
        return True

    def respond(self, stream_id: int, message: bytes) -> None:
        """Send the only message of a call and the status OK."""
        if not self._unread.take(len(message)):
            self.finish(stream_id, *UNREAD, ())
            return
        self._time_limits.response_sent()
        if not self._share.proven:
            self._prove(stream_id)
        try:
            self._http2.send_response(stream_id, RESPONSE)
            self._queue(stream_id, message)
            self._http2.send_trailers(stream_id, OK_TRAILERS)
        except ngh2.NGH2Error:
            return
        if len(self._rpcs) == 1 and not self._receiving:
            self._flush()  # no other call's response can share the segment
        else:
            self._flush_soon()

    def finish(self, stream_id: int, code: Code, details: str, metadata: Metadata) -> None:
        """Send the status of a call."""
        if code is Code.OK:
            self._prove(stream_id)
            fields = OK_TRAILERS
        else:
            fields = trailers(code, details, metadata)
        with if_open:
            if stream_id in self._begun:
                self._http2.send_trailers(stream_id, fields)
            else:
                self._http2.send_response(stream_id, RESPONSE + fields, end_stream=True)
            self._answered(stream_id)

    def room(self, stream_id: int) -> asyncio.Future[None] | None:
        """Return what to await before the next message; None if there is room."""
        if self._has_room(stream_id):
            return None
        return self._waiting.setdefault(stream_id, self._loop.create_future())

    def _has_room(self, stream_id: int) -> bool:
        if not self._open:
            return True
        return not self._paused and self._http2.queued_body_size(stream_id) < _WAITING_BYTES

    # Frames.

    def _queue(self, stream_id: int, message: bytes) -> None:
        if len(message) > _COPIED_BYTES:
            self._http2.send_data(stream_id, prefix(message))
            self._http2.send_data(stream_id, message)
        else:
            self._http2.send_data(stream_id, prefix(message) + message)

    def _answered(self, stream_id: int) -> None:
        rpc = self._rpcs.get(stream_id)
        if rpc and not rpc.request_ended:
            self._answered_early.add(stream_id)
        self._flush_soon()

    def _prove(self, stream_id: int) -> None:
        """Note that a call has succeeded whose caller the server knows, or that anyone may make."""
        if (rpc := self._rpcs.get(stream_id)) and rpc.proves:
            self._share.proven = True

    def _flush_soon(self) -> None:
        """Flush at the end of this turn of the event loop, with the data of other calls."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = True  # nothing in here needs to flush again
        try:
            while self._open:
                data = b"" if self._paused else self._http2.data_to_send(_CHUNK_BYTES)
                if data:
                    self._transport.write(data)
                if (queued := self._http2.queued_body_size()) or self._unread.size_bytes:
                    self._unread.sent(len(data), queued)
                reset = self._answered_early and not self._paused and self._reset_answered()
                events = self._http2.events()
                if events:
                    self._handle(events)
                more = events and (self._http2.want_write or not self._http2.want_read)
                if len(data) < _CHUNK_BYTES and not reset and not more:
                    break
            if self._waiting:
                self._wake()
        except ngh2.NGH2Error as error:
            self._break(str(error))
        finally:
            self._flushing = False

    def _reset_answered(self) -> bool:
        """Reset answered streams whose client still sends, once the response is sent (RFC 9113, 8.1)."""
        sent = [stream_id for stream_id in self._answered_early if not self._http2.queued_body_size(stream_id)]
        for stream_id in sent:
            self._answered_early.discard(stream_id)
            with if_open:
                self._http2.reset_stream(stream_id, ngh2.ErrorCode.NO_ERROR)
        return bool(sent)

    def _wake(self) -> None:
        for stream_id in list(self._waiting):
            if self._has_room(stream_id):
                self._release(stream_id)

    def _release(self, stream_id: int) -> None:
        waiting = self._waiting.pop(stream_id, None)
        if waiting and not waiting.done():
            waiting.set_result(None)

    def _break(self, reason: str) -> None:
        log.debug("closed a connection: %s", reason)
        self._open = False
        self._transport.abort()
