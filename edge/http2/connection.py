"""One client's connection: bytes to frames and calls, and back. nghttp2 does everything of HTTP/2 itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property, lru_cache
from typing import Final, cast

import grpc
import ngh2

from edge.http2.connection_limits import ConnectionLimits
from edge.http2.messages import IDENTITY, Refused, prefix
from edge.http2.metadata import OK_TRAILERS, RESPONSE, Field, Head, Metadata, NotGrpc, read_head, trailers
from edge.http2.routes import Route
from edge.http2.rpc import Rpc
from edge.rpc.limits import Limits

log = logging.getLogger(__name__)

#: What a stream whose handler does not read may send, and what all of them may.
_STREAM_WINDOW: Final = 256 * 1024
_CONNECTION_WINDOW: Final = 64 * 1024**2
_MAX_HEADERS: Final = 256
#: A call whose header fields are too large is refused; if they are so many times too large, the connection is.
_HEADER_TOLERANCE: Final = 4
#: A client that gives up calls because the server is slow must not be taken for an attacker, so it may reset more
#: streams than nghttp2 lets it by default: so many at once, and so many a second.
_MAX_RESETS: Final = (2_000, 500)
_CHUNK_BYTES: Final = 256 * 1024
#: How much of a stream may wait for its client before its handler has to wait too.
_WAITING_BYTES: Final = 64 * 1024
#: A message above this is not copied to stand behind its prefix.
_COPIED_BYTES: Final = 16 * 1024
_NOT_FOUND = "the server has no such method"
_NO_HEAD: Final = Head("", None, IDENTITY)

#: A call may have to say something to a stream or connection that ended in the same moment.
_whatever_is_gone = suppress(ngh2.NGH2Error)

#: Returns what answers a method by its path and header fields, or None.
Find = Callable[[str, Sequence[Field]], Route | None]


class Connection(asyncio.Protocol):
    """One connection, whose methods are called on the event loop only.

    Args:
        find: the methods.
        limits: what the client may take.
        connections: where it is listed while it is open.
    """

    def __init__(self, find: Find, limits: Limits, connections: set[Connection]) -> None:
        self._find = find
        self._limits = limits
        self._connections = connections
        self._http2 = ngh2.Connection(ngh2.Role.SERVER, _configuration(limits.max_metadata_bytes))
        self._rpcs: dict[int, Rpc] = {}
        self._begun: set[int] = set()  # streams whose response has begun
        self._last_fields: tuple[Field, ...] = ()
        self._last_head = _NO_HEAD
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._answered_early: set[int] = set()  # streams whose response has ended and whose request has not
        self._open = False
        self._paused = False
        self._flushing = False
        self._receiving = False
        self._loop = asyncio.get_running_loop()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by inheritance
        self._open = True
        self._time_limits = ConnectionLimits(self._limits, self._transport.abort, self.refuse)
        secured = self._transport.get_extra_info("ssl_object")
        if secured and secured.selected_alpn_protocol() != "h2":
            self._break("its client did not agree on HTTP/2")
            return
        if len(self._connections) >= self._limits.max_connections:
            self._break("there are too many of them")
            return
        self._connections.add(self)
        self._http2.initiate_connection(
            {
                ngh2.Setting.MAX_CONCURRENT_STREAMS: self._limits.max_concurrent_streams,
                ngh2.Setting.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
                ngh2.Setting.MAX_HEADER_LIST_SIZE: self._limits.max_metadata_bytes,
            }
        )
        self._http2.set_local_window_size(_CONNECTION_WINDOW)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        if not self._open:
            return
        self._receiving = True
        try:
            self._http2.receive_data(data)
            self._handle(self._http2.events())
        except ngh2.NGH2Error as error:
            self._break(str(error))
            return
        finally:
            self._receiving = False
        # Not now: a client that is woken up by each answer of many takes more of the processor than they do.
        if self._http2.want_write or not self._http2.want_read:
            self._flush_soon()

    def connection_lost(self, error: Exception | None) -> None:
        """Give up every call."""
        self._open = False
        self._time_limits.close()
        self._connections.discard(self)
        self._wake()
        for rpc in list(self._rpcs.values()):
            rpc.close()
        self._rpcs.clear()

    def pause_writing(self) -> None:
        """Send nothing for now: the client does not read."""
        self._paused = True

    def resume_writing(self) -> None:
        """Send on."""
        self._paused = False
        self._flush()

    # Shutdown.

    @property
    def idle(self) -> bool:
        """Whether no call is on its way."""
        return all(rpc.done for rpc in self._rpcs.values()) and not self._http2.queued_body_size()

    def refuse_soon(self) -> None:
        """Tell the client to begin no further call, and answer those that are on their way to here."""
        with _whatever_is_gone:
            self._http2.send_shutdown_notice()
            self._flush()

    def refuse(self) -> None:
        """Take no further call."""
        with _whatever_is_gone:
            self._http2.send_goaway()
            self._flush()

    async def stop(self) -> None:
        """Cancel every call, and close the connection when its status is sent."""
        await asyncio.gather(*(rpc.stop() for rpc in list(self._rpcs.values())))
        if self._open:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    # What calls ask for.

    @cached_property
    def peer(self) -> str:
        """The client's address as gRPC writes it."""
        host, port = self._transport.get_extra_info("peername")[:2]
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Let the client send so many bytes more."""
        try:  # and no context manager, which would take longer than what it guards
            self._http2.acknowledge_received_data(size, stream_id)
        except ngh2.NGH2Error:
            return
        if self._http2.want_write:
            self._flush_soon()

    def send(self, stream_id: int, message: bytes) -> None:
        """Send a message."""
        with _whatever_is_gone:
            self._begin(stream_id)
            self._queue(stream_id, message)
            self._flush_soon()

    def respond(self, stream_id: int, message: bytes) -> None:
        """Send the one message of a call, and that the call ended well."""
        self._time_limits.response_sent()
        try:
            self._http2.send_response(stream_id, RESPONSE)
            self._queue(stream_id, message)
            self._http2.send_trailers(stream_id, OK_TRAILERS)
        except ngh2.NGH2Error:
            return
        if len(self._rpcs) == 1 and not self._receiving:
            self._flush()  # there is no other call whose answer could go with it
        else:
            self._flush_soon()

    def finish(self, stream_id: int, code: grpc.StatusCode, details: str, metadata: Metadata) -> None:
        """Send how a call ended."""
        fields = OK_TRAILERS if code is grpc.StatusCode.OK else trailers(code, details, metadata)
        with _whatever_is_gone:
            if stream_id in self._begun:
                self._http2.send_trailers(stream_id, fields)
            else:
                self._http2.send_response(stream_id, RESPONSE + fields, end_stream=True)
            self._answered(stream_id)

    def room(self, stream_id: int) -> asyncio.Future[None] | None:
        """Return what to wait for until there is room for another message; None if there is."""
        if self._has_room(stream_id):
            return None
        return self._waiting.setdefault(stream_id, self._loop.create_future())

    def _has_room(self, stream_id: int) -> bool:
        if not self._open:
            return True
        return not self._paused and self._http2.queued_body_size(stream_id) < _WAITING_BYTES

    # From frames to calls.

    def _handle(self, events: list[ngh2.Event]) -> None:
        for event in events:
            if isinstance(event, ngh2.DataReceived):
                self._receive(event.stream_id, event.data, event.end_stream)
            elif isinstance(event, ngh2.RequestReceived):
                self._accept(event.stream_id, event.headers)
                if event.end_stream:
                    self._receive(event.stream_id, b"", True)
            elif isinstance(event, ngh2.StreamClosed):
                self._forget(event.stream_id)
            elif isinstance(event, ngh2.TrailersReceived):
                self._receive(event.stream_id, b"", True)
            elif isinstance(event, ngh2.PingReceived):
                if self._time_limits.ping_received():
                    with _whatever_is_gone:
                        self._http2.terminate_connection(ngh2.ErrorCode.ENHANCE_YOUR_CALM)
            elif isinstance(event, ngh2.SettingsReceived):
                self._time_limits.handshake_done()
            elif isinstance(event, ngh2.ConnectionClosed):
                self._transport.close()

    def _receive(self, stream_id: int, data: bytes, ended: bool) -> None:
        rpc = self._rpcs.get(stream_id)
        if rpc:
            rpc.receive(data, ended)

    def _accept(self, stream_id: int, fields: tuple[Field, ...]) -> None:
        context = copy_context()  # of the call; its caller's name is set in it
        route: Route | None = None
        refused: Refused | NotGrpc | None = None
        try:
            if fields != self._last_fields:  # most clients send the same with every call
                self._last_head, self._last_fields = read_head(fields, self._limits.max_metadata_bytes), fields
            head = self._last_head
            route = context.run(self._find, head.path, fields)
            if route is None:
                refused = Refused(grpc.StatusCode.UNIMPLEMENTED, _NOT_FOUND)
        except (Refused, NotGrpc) as error:
            head, refused = _NO_HEAD, error
        if not self._rpcs:
            self._time_limits.set_busy(True)
        rpc = Rpc(self, stream_id, route, head, fields, self._limits.max_message_bytes, context)
        self._rpcs[stream_id] = rpc
        if head.timeout == 0:
            rpc.expire()
        if isinstance(refused, Refused):
            self.finish(stream_id, refused.code, refused.details, ())
        elif refused:
            with _whatever_is_gone:
                self._http2.send_response(stream_id, ((b":status", refused.status),), end_stream=True)
                self._answered(stream_id)

    def _queue(self, stream_id: int, message: bytes) -> None:
        if len(message) > _COPIED_BYTES:
            self._http2.send_data(stream_id, prefix(message))
            self._http2.send_data(stream_id, message)
        else:
            self._http2.send_data(stream_id, prefix(message) + message)

    def _begin(self, stream_id: int) -> None:
        if stream_id not in self._begun:
            self._begun.add(stream_id)
            self._http2.send_response(stream_id, RESPONSE)
            self._time_limits.response_sent()

    def _answered(self, stream_id: int) -> None:
        """Send the end of a response, and let the client send no more of its request."""
        rpc = self._rpcs.get(stream_id)
        if rpc and not rpc.request_ended:
            self._answered_early.add(stream_id)
        self._flush_soon()

    def _forget(self, stream_id: int) -> None:
        self._begun.discard(stream_id)
        self._answered_early.discard(stream_id)
        rpc = self._rpcs.pop(stream_id, None)
        if rpc:
            rpc.close()
        if not self._rpcs:
            self._time_limits.set_busy(False)
        waiting = self._waiting.pop(stream_id, None)
        if waiting and not waiting.done():
            waiting.set_result(None)

    # From calls to frames.

    def _flush_soon(self) -> None:
        """Send what there is, together with what others have to say in this turn of the event loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = True  # whatever is done in here, nobody needs to call it again
        try:
            while self._open:
                data = b"" if self._paused else self._http2.data_to_send(_CHUNK_BYTES)
                if data:
                    self._transport.write(data)
                reset = self._answered_early and not self._paused and self._reset_answered()
                events = self._http2.events()
                if events:
                    self._handle(events)
                elif len(data) < _CHUNK_BYTES and not reset:
                    break
            if self._waiting:
                self._wake()
        except ngh2.NGH2Error as error:
            self._break(str(error))
        finally:
            self._flushing = False

    def _reset_answered(self) -> bool:
        """Tell clients that still send to answered calls to stop, once the whole answer is sent (RFC 9113, 8.1)."""
        sent = [stream_id for stream_id in self._answered_early if not self._http2.queued_body_size(stream_id)]
        for stream_id in sent:
            self._answered_early.discard(stream_id)
            with _whatever_is_gone:
                self._http2.reset_stream(stream_id, ngh2.ErrorCode.NO_ERROR)
        return bool(sent)

    def _wake(self) -> None:
        for stream_id, waiting in list(self._waiting.items()):
            if self._has_room(stream_id):
                del self._waiting[stream_id]
                if not waiting.done():
                    waiting.set_result(None)

    def _break(self, reason: str) -> None:
        log.debug("a connection is closed: %s", reason)
        self._open = False
        self._transport.abort()


@lru_cache
def _configuration(max_header_bytes: int) -> ngh2.Configuration:
    return ngh2.Configuration(
        auto_window_update=False,
        max_inbound_header_list_size=_HEADER_TOLERANCE * max_header_bytes,
        max_inbound_header_count=_MAX_HEADERS,
        stream_reset_rate_limit=_MAX_RESETS,
    )
