"""Cases of RFC 9113, sections 3 to 5 and 7: preface, frame format, streams, errors."""

from __future__ import annotations

from collections.abc import Callable

from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.conformance.http2.case import (
    ANSWERED,
    CLOSED,
    GOAWAY,
    NO_ERROR,
    RESET,
    Case,
    Frames,
    Say,
    as_connection_error,
    body,
    call,
    head,
    message,
    watch,
)
from tests.support.http2_client import PREFACE, RawClient, raw

_SETTINGS = SettingsFrame(0).serialize()
_PROTOCOL = GOAWAY("PROTOCOL_ERROR")
_FRAME_SIZE = GOAWAY("FRAME_SIZE_ERROR")
_CANCEL = 8


def _reset() -> Frame:
    return RstStreamFrame(1, error_code=_CANCEL)


async def _first_frame(client: RawClient) -> str:
    await client.greet().agreed()
    return type(client.frames[0]).__name__


async def _byte_by_byte(client: RawClient) -> list[Frame]:
    data = PREFACE + _SETTINGS + b"".join(frame.serialize() for frame in call(client))
    for at in range(len(data)):
        client.send(data[at : at + 1])
        await client.writer.drain()
    return []


def _after_the_end(make: Callable[[RawClient], Frame]) -> Say:
    """Send a frame on an answered stream."""

    async def say(client: RawClient) -> Frames:
        client.send(*call(client))
        await client.answer()
        client.answers.clear()
        return [make(client)]

    return say


def _after_a_reset(make: Callable[[RawClient], Frame]) -> Say:
    """Send a frame on a stream that the client has reset."""
    return lambda client: [head(client), _reset(), make(client)]


def _continuation(_: RawClient) -> Frame:
    return ContinuationFrame(1, b"", flags=["END_HEADERS"])


def _inside_a_field_block(make: Callable[[RawClient], Frame | bytes]) -> Say:
    def say(client: RawClient) -> Frames:
        block = head(client).data
        end = ContinuationFrame(1, block[9:], flags=["END_HEADERS"])
        return [HeadersFrame(1, block[:9]), make(client), end, body()]

    return say


def _too_many_streams(client: RawClient) -> list[Frame]:
    return [head(client, stream=2 * number + 1) for number in range(4097)]


def _flagged(frame: Frame, flags: int, at: int = 4) -> bytes:
    data = bytearray(frame.serialize())
    data[at] |= flags
    return bytes(data)


def _reserved(frame: Frame) -> bytes:
    """The frame with the reserved bit of its header set."""
    return _flagged(frame, 0x80, at=5)


_FORGOTTEN = (
    "A deviation: nghttp2 keeps no state of closed streams and ignores frames on them, "
    "because a correct client may have sent them before it learned of the end."
)

CASES = [
    # 3.4 Connection preface.
    Case("3.4", "the first frame of the server is SETTINGS", _first_frame, "SettingsFrame", greets=False),
    Case("3.4", "preface and request in one segment", lambda c: [PREFACE, _SETTINGS, *call(c)], ANSWERED, greets=False),
    Case("3.4", "preface and request byte by byte", _byte_by_byte, ANSWERED, greets=False),
    Case("3.4", "wrong preface", lambda _: [PREFACE[:-2] + b"xx"], CLOSED, greets=False),
    Case("3.4", "request of HTTP/1.1", lambda _: [b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"], CLOSED, greets=False),
    Case(
        "3.4", "ClientHello of TLS", lambda _: [b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3" + bytes(512)], CLOSED, greets=False
    ),
    Case("3.4", "4096 zeros", lambda _: [bytes(4096)], CLOSED, greets=False),
    Case("3.4", "PING in place of SETTINGS", lambda _: [PREFACE, PingFrame(0)], _PROTOCOL, greets=False),
    Case("3.4", "DATA in place of SETTINGS", lambda _: [PREFACE, DataFrame(1)], _PROTOCOL, greets=False),
    # 4.1 Frame format.
    Case("4.1", "frame of an unknown type", lambda _: [raw(0xEE, 0xFF, 0, b"abc")], NO_ERROR),
    Case(
        "4.1",
        "frame of an unknown type on an open stream",
        lambda c: [head(c), raw(0xEE, 0, 1, b"a"), body()],
        ANSWERED,
    ),
    Case("4.1", "undefined flags of PING", lambda _: [raw(6, 0xFE, 0, bytes(8))], NO_ERROR),
    Case("4.1", "undefined flags of HEADERS", lambda c: [_flagged(head(c), 0xD2), body()], ANSWERED),
    Case("4.1", "undefined flags of DATA", lambda c: [head(c), _flagged(body(), 0xF6)], ANSWERED),
    Case("4.1", "reserved bit of PING", lambda _: [_reserved(PingFrame(0))], NO_ERROR),
    Case("4.1", "reserved bit of HEADERS and DATA", lambda c: [_reserved(frame) for frame in call(c)], ANSWERED),
    # 4.2 Frame size.
    Case("4.2", "DATA of 2^14 bytes", lambda c: [head(c), body(1, message(2**14 - 5))], ANSWERED),
    as_connection_error(
        "4.2", "DATA of 2^14 + 1 bytes", lambda c: [head(c), raw(0, 0, 1, bytes(2**14 + 1))], "FRAME_SIZE_ERROR"
    ),
    Case("4.2", "HEADERS of 2^14 + 1 bytes", lambda _: [raw(1, 4, 1, bytes(2**14 + 1))], _FRAME_SIZE),
    Case("4.2", "SETTINGS of 2^14 + 2 bytes", lambda _: [raw(4, 0, 0, bytes(2**14 + 2))], _FRAME_SIZE),
    # 4.3 Field section compression.
    Case("4.3", "field block that is not HPACK", lambda _: [raw(1, 5, 1, b"\xff" * 6)], GOAWAY("COMPRESSION_ERROR")),
    Case("4.3", "PRIORITY inside a field block", _inside_a_field_block(lambda _: PriorityFrame(1)), _PROTOCOL),
    Case("4.3", "HEADERS inside a field block", _inside_a_field_block(lambda c: head(c, stream=3)), _PROTOCOL),
    # 5.1 Stream states.
    Case("5.1", "idle: DATA", lambda _: [DataFrame(1, b"x")], _PROTOCOL),
    Case("5.1", "idle: RST_STREAM", lambda _: [_reset()], _PROTOCOL),
    Case("5.1", "idle: WINDOW_UPDATE", lambda _: [WindowUpdateFrame(1, 100)], _PROTOCOL),
    Case("5.1", "idle: CONTINUATION", lambda c: [_continuation(c)], _PROTOCOL),
    Case("5.1", "idle: PRIORITY", lambda _: [PriorityFrame(1, stream_weight=1)], NO_ERROR),
    as_connection_error(
        "5.1", "half-closed (remote): DATA", lambda c: [*watch(c), DataFrame(1, b"x")], "STREAM_CLOSED"
    ),
    as_connection_error("5.1", "half-closed (remote): HEADERS", lambda c: [*watch(c), head(c)], "STREAM_CLOSED"),
    Case("5.1", "half-closed (remote): CONTINUATION", lambda c: [*watch(c), _continuation(c)], _PROTOCOL),
    Case("5.1", "half-closed (remote): WINDOW_UPDATE", lambda c: [*watch(c), WindowUpdateFrame(1, 9)], NO_ERROR),
    Case("5.1", "half-closed (remote): PRIORITY", lambda c: [*watch(c), PriorityFrame(1, stream_weight=1)], NO_ERROR),
    Case("5.1", "half-closed (remote): RST_STREAM", lambda c: [*watch(c), _reset()], NO_ERROR),
    Case(
        "6.1",
        "DATA on a stream closed by RST_STREAM",
        _after_a_reset(lambda _: DataFrame(1, b"x")),
        RESET("STREAM_CLOSED"),
        NO_ERROR,
        _FORGOTTEN,
    ),
    Case(
        "6.1",
        "DATA on a closed stream",
        _after_the_end(lambda _: DataFrame(1, b"x")),
        RESET("STREAM_CLOSED"),
        NO_ERROR,
        _FORGOTTEN,
    ),
    Case("5.1", "closed by RST_STREAM: HEADERS", _after_a_reset(head), NO_ERROR),  # may be STREAM_CLOSED
    Case("5.1", "closed by RST_STREAM: CONTINUATION", _after_a_reset(_continuation), _PROTOCOL),
    Case("5.1", "closed by RST_STREAM: PRIORITY", _after_a_reset(lambda _: PriorityFrame(1)), NO_ERROR),
    Case("5.1", "closed: HEADERS", _after_the_end(head), NO_ERROR),  # may be STREAM_CLOSED
    Case("5.1", "closed: CONTINUATION", _after_the_end(_continuation), _PROTOCOL),
    Case("5.1", "closed: PRIORITY", _after_the_end(lambda _: PriorityFrame(1)), NO_ERROR),
    Case("5.1", "closed: WINDOW_UPDATE", _after_the_end(lambda _: WindowUpdateFrame(1, 9)), NO_ERROR),
    Case("5.1", "closed: RST_STREAM", _after_the_end(lambda _: _reset()), NO_ERROR),
    # 5.1.1 Stream identifiers, 5.1.2 concurrency.
    Case("5.1.1", "even stream identifier", lambda c: call(c, stream=2), _PROTOCOL, stream=2),
    Case(
        "5.1.1",
        "stream identifier below an earlier one",
        lambda c: [*call(c, stream=5), *call(c, stream=3)],
        _PROTOCOL,
        NO_ERROR,
        _FORGOTTEN,
        stream=3,
    ),
    Case(
        "5.1.1",
        "stream identifiers with gaps",
        lambda c: [*call(c, stream=5), *call(c, stream=99)],
        ANSWERED,
        stream=99,
    ),
    Case("5.1.1", "the last stream identifier", lambda c: call(c, stream=2**31 - 1), ANSWERED, stream=2**31 - 1),
    as_connection_error("5.1.2", "more streams than allowed", _too_many_streams, "PROTOCOL_ERROR", 8193),
    # 5.3 Priority, whose signals RFC 9113 deprecates.
    Case(
        "5.3.1",
        "HEADERS that depend on their own stream",
        lambda c: [raw(1, 0x24, 1, b"\0\0\0\1\7" + head(c).data), body()],
        ANSWERED,
        _PROTOCOL,
        "RFC 9113 has dropped this rule of RFC 7540, 5.3.1, and nghttp2 still keeps it for HEADERS.",
    ),
    Case("5.3.1", "PRIORITY that depends on its own stream", lambda _: [PriorityFrame(1, depends_on=1)], NO_ERROR),
    # 5.4.1 Connection errors.
    Case("5.4.1", "request after a connection error", lambda c: [raw(6, 0, 0, b"1"), *call(c)], _FRAME_SIZE),
    # 5.5 Extensions.
    Case("5.5", "unknown frame inside a field block", _inside_a_field_block(lambda _: raw(0xEE, 0, 0, b"")), _PROTOCOL),
    # 7 Error codes.
    Case(
        "7",
        "GOAWAY with an unknown error code",
        lambda c: [head(c), GoAwayFrame(0, error_code=0xFF), body()],
        f"{ANSWERED}, {CLOSED}",
    ),
    Case(
        "7", "RST_STREAM with an unknown error code", lambda c: [head(c), RstStreamFrame(1, error_code=0xFF)], NO_ERROR
    ),
]
