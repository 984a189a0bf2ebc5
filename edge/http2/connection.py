"""One client's connection: translates bytes to calls, and their answers to bytes. nghttp2 implements HTTP/2."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property, lru_cache
from typing import Final, cast

import ngh2

from edge.connections.paced import PacedReader
from edge.connections.quota import Share
from edge.http2.connection_limits import ConnectionLimits, UnreadAnswers
from edge.http2.messages import (
    IDENTITY,
    OK_TRAILERS,
    RESPONSE,
    CallMetadata,
    Field,
    NotGrpc,
    RequestHeader,
    prefix,
    read_head,
    trailers,
)
from edge.http2.rpc import UNREAD, Route, Rpc
from edge.rpc.limits import Limits
from edge.rpc.methods import Refused
from edge.serving.statuses import Code

log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 256 * 1024
#: The queued bytes of a stream above which its handler waits for the client.
_WAITING_BYTES: Final = 64 * 1024
#: A message above this size is sent without a copy behind its prefix.
_COPIED_BYTES: Final = 16 * 1024

#: A call may use a stream or connection that has just ended.
if_open = suppress(ngh2.NGH2Error)
#: What the client may send on one stream, and on all of them, before handlers read it.
_STREAM_WINDOW: Final = 256 * 1024
_CONNECTION_WINDOW: Final = 64 * 1024**2
_MAX_HEADERS: Final = 256
#: A call with too large header fields is refused; if they exceed the limit this many times, the connection ends.
_HEADER_TOLERANCE: Final = 4
#: The limits for resets at once and per second. They are above nghttp2's defaults, because a client that cancels calls
#: of a slow server is not an attacker.
_MAX_RESETS: Final = (2_000, 500)
#: The time in which a client without a call may read the end of its connection.
_GOODBYE_SECONDS: Final = 1.0
#: What an open call costs in memory, beside its header fields and its messages.
_CALL_BYTES: Final = 8 * 1024
_TOO_MUCH = "connection: got more open calls, headers and messages than it may hold, expected fewer. Try again later."
_NO_HEAD: Final = RequestHeader("", None, IDENTITY, 0)

#: Returns the route of a call by its path and header fields, or None.
FindRoute = Callable[[str, Sequence[Field]], Route | None]


class Http2Connection(asyncio.Protocol):
    """One connection, in ``connections`` while it is open. Only the event loop uses it."""

    def __init__(self, find: FindRoute, limits: Limits, connections: set[Http2Connection], share: Share) -> None:
        self._http2 = ngh2.Connection(ngh2.Role.SERVER, _configuration(limits.max_metadata_bytes))
        self._share = share
        self._rpcs: dict[int, Rpc] = {}
        self._begun: set[int] = set()  # streams whose response has begun
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._answered_early: set[int] = set()  # streams whose response has ended and whose request has not
        self._unread = UnreadAnswers(share)
        self._open = self._paused = self._flushing = self._receiving = False
        self._loop = asyncio.get_running_loop()
        self._find, self._limits, self._connections = find, limits, connections
        self._last_fields: tuple[Field, ...] = ()
        self._last_head = _NO_HEAD

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self._share.follow(self._leave, self._sweep)
        self._reader = PacedReader(self._transport, self._parse)
        self._open = True
        self._time_limits = ConnectionLimits(self._limits, self._share, self._rpcs, self._transport.abort)
        secured = self._transport.get_extra_info("ssl_object")
        if secured and secured.selected_alpn_protocol() != "h2":
            self._break("its client did not agree on HTTP/2")
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
        self._reader.data_received(data)

    def _parse(self, data: bytes) -> None:
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
        if not self._http2.want_read:
            self._flush()  # nghttp2 refuses what follows, and says so now
        elif self._http2.want_write:
            # Later: waking the client for each of many responses would take more processor time than the responses.
            self._flush_soon()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel every call, and free everything: what refers to this connection lets go of it."""
        self._open = False
        self._reader.close()
        self._share.close()
        self._time_limits.close()
        self._connections.discard(self)
        self._wake()
        for rpc in list(self._rpcs.values()):
            rpc.close()
        self._rpcs.clear()

    # Shutdown.

    @property
    def idle(self) -> bool:
        """Whether no call is open and no data is queued."""
        return all(rpc.done for rpc in self._rpcs.values()) and not self._http2.queued_body_size()

    def refuse_soon(self) -> None:
        """Announce the shutdown to the client, but accept the calls that are already on their way."""
        with if_open:
            self._http2.send_shutdown_notice()
            self._flush()

    def refuse(self) -> None:
        """Accept no further call."""
        with if_open:
            self._http2.send_goaway()
            self._flush()

    async def stop(self) -> None:
        """Cancel every call, send the statuses, and close the connection."""
        await asyncio.gather(*(rpc.stop() for rpc in list(self._rpcs.values())))
        if self._open:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _leave(self) -> None:
        """Disconnect the client; one without a call hears before that it has to connect again."""
        if self._rpcs:
            self._transport.abort()
            return
        self.refuse()
        self._loop.call_later(_GOODBYE_SECONDS, self._transport.abort)

    def _sweep(self, now: float) -> None:
        for rpc in self._time_limits.late_requests(now):
            self._share.refused("slow request")
            rpc.too_slow()
        self._unread.sent(0, self._http2.queued_body_size())  # without the answers of calls that were cancelled

    @cached_property
    def peer(self) -> str:
        """The client's address in gRPC's notation; on a Unix socket, clients have none."""
        name = self._transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unix:"
        host, port = name[:2]
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Let the client send this many more bytes."""
        try:  # faster than the context manager
            self._http2.acknowledge_received_data(size, stream_id)
        except ngh2.NGH2Error:
            return
        if self._http2.want_write:
            self._flush_soon()

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
                    with if_open:
                        self._http2.terminate_connection(ngh2.ErrorCode.ENHANCE_YOUR_CALM)
            elif isinstance(event, ngh2.SettingsReceived):
                self._time_limits.handshake_done()
            elif isinstance(event, ngh2.ConnectionClosed):
                self._transport.close()

    def _receive(self, stream_id: int, data: bytes, ended: bool) -> None:
        if rpc := self._rpcs.get(stream_id):
            rpc.receive(data, ended)

    def _accept(self, stream_id: int, fields: tuple[Field, ...]) -> None:
        context = copy_context()  # of the call, for the name of its caller
        route: Route | None = None
        refused: Refused | NotGrpc | None = None
        charged = 0
        try:
            cost = _CALL_BYTES
            if fields != self._last_fields:  # most clients send the same fields in each call
                self._last_head, self._last_fields = read_head(fields, self._limits.max_metadata_bytes), fields
                cost += self._last_head.size_bytes
            if not self._share.hold(cost):
                raise Refused(Code.RESOURCE_EXHAUSTED, _TOO_MUCH)
            charged, head, fields = cost, self._last_head, self._last_fields
            route = context.run(self._find, head.path, fields)
        except (Refused, NotGrpc) as error:
            head, refused, fields = _NO_HEAD, error, ()
        if not self._rpcs:
            self._time_limits.set_busy(True)
        rpc = Rpc(self, stream_id, route, head, fields, self._share, charged, context)
        self._rpcs[stream_id] = rpc
        if head.timeout == 0:
            rpc.expire()
        elif head.timeout:
            self._time_limits.end_by(rpc.deadline)
        if isinstance(refused, Refused):
            self.finish(stream_id, *refused.status)
        elif refused:
            with if_open:
                self._http2.send_response(stream_id, ((b":status", refused.status),), end_stream=True)
                self._answered(stream_id)

    def _forget(self, stream_id: int) -> None:
        self._begun.discard(stream_id)
        self._answered_early.discard(stream_id)
        if rpc := self._rpcs.pop(stream_id, None):
            rpc.close()
        if not self._rpcs:
            self._time_limits.set_busy(False)
        self._release(stream_id)

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

    def finish(self, stream_id: int, code: Code, details: str, metadata: CallMetadata) -> None:
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
                if events := self._http2.events():
                    self._handle(events)
                more = events and (self._http2.want_write or not self._http2.want_read)
                if len(data) < _CHUNK_BYTES and not reset and not more:
                    break
            self._wake()
        except ngh2.NGH2Error as error:
            self._break(str(error))
        finally:
            self._flushing = False

    def _reset_answered(self) -> bool:
        """Reset answered streams whose client still sends, once the response is sent (RFC 9113, 8.1)."""
        for stream_id in (sent := [one for one in self._answered_early if not self._http2.queued_body_size(one)]):
            self._answered_early.discard(stream_id)
            with if_open:
                self._http2.reset_stream(stream_id, ngh2.ErrorCode.NO_ERROR)
        return bool(sent)

    def _wake(self) -> None:
        for stream_id in list(self._waiting):
            if self._has_room(stream_id):
                self._release(stream_id)

    def _release(self, stream_id: int) -> None:
        if (waiting := self._waiting.pop(stream_id, None)) and not waiting.done():
            waiting.set_result(None)

    def _break(self, reason: str) -> None:
        log.debug("closed a connection: %s", reason)
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
