"""Cases of RFC 9113, sections 3 to 5 and 7: preface, frame format, streams, errors."""

from __future__ import annotations

from collections.abc import Callable

from hyperframe import frame as h2

from tests.conformance.http2.case import (
    ANSWERED,
    CLOSED,
    COMPRESSION,
    DIFFERS,
    FRAME_SIZE,
    NO_ERROR,
    PROTOCOL,
    Case,
    Frames,
    Say,
    body,
    call,
    head,
    watch,
)
from tests.support.http2_client import PREFACE, RawClient, raw

_SETTINGS = h2.SettingsFrame(0).serialize()
_CLIENT_HELLO = b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3" + bytes(512)
_DATA = h2.DataFrame(1, b"x")
_WINDOW = h2.WindowUpdateFrame(1, 9)
_RESET = h2.RstStreamFrame(1, error_code=8)
_CONTINUATION = h2.ContinuationFrame(1, b"", flags=["END_HEADERS"])
#: One unknown field, which suits every RPC, and fills a DATA frame of 2^14 bytes.
_FILLING = b"\x7a\xf6\xff\x80\0" + bytes(2**14 - 10)


async def _first_frame(client: RawClient) -> str:
    await client.greet().agreed()
    return type(client.frames[0]).__name__


async def _byte_by_byte(client: RawClient) -> list[h2.Frame]:
    for byte in PREFACE + _SETTINGS + b"".join(frame.serialize() for frame in call(client)):
        client.send(bytes((byte,)))
        await client.writer.drain()
    return []


def _after_the_end(make: Callable[[RawClient], h2.Frame]) -> Say:
    async def say(client: RawClient) -> Frames:
        client.send(*call(client))
        await client.answer()
        client.answers.clear()
        return [make(client)]

    return say


def _after_a_reset(make: Callable[[RawClient], h2.Frame]) -> Say:
    return lambda client: [head(client), _RESET, make(client)]


def _inside_a_field_block(make: Callable[[RawClient], h2.Frame | bytes]) -> Say:
    def say(client: RawClient) -> Frames:
        block = head(client).data
        end = h2.ContinuationFrame(1, block[9:], flags=["END_HEADERS"])
        return [h2.HeadersFrame(1, block[:9]), make(client), end, body()]

    return say


def _too_many_streams(client: RawClient) -> list[h2.Frame]:
    return [head(client, stream=2 * number + 1) for number in range(4097)]


def _reserved(frame: h2.Frame) -> bytes:
    """The frame with the reserved bit of its header set."""
    data = bytearray(frame.serialize())
    data[5] |= 0x80
    return bytes(data)


CASES = [
    # Connection preface.
    Case("3.4 the first frame of the server is SETTINGS", "SettingsFrame", _first_frame, greets=False),
    Case("3.4 preface and request in one segment", ANSWERED, lambda c: [PREFACE, _SETTINGS, *call(c)], greets=False),
    Case("3.4 preface and request byte by byte", ANSWERED, _byte_by_byte, greets=False),
    Case("3.4 wrong preface", CLOSED, lambda _: [PREFACE[:-2] + b"xx"], greets=False),
    Case("3.4 request of HTTP/1.1", CLOSED, lambda _: [b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"], greets=False),
    Case("3.4 ClientHello of TLS", CLOSED, lambda _: [_CLIENT_HELLO], greets=False),
    Case("3.4 PING in place of SETTINGS", PROTOCOL, lambda _: [PREFACE, h2.PingFrame(0)], greets=False),
    # Frames and field blocks.
    Case("4.1 frame of an unknown type", ANSWERED, lambda c: [head(c), raw(0xEE, 0xFF, 1, b"a"), body()]),
    Case("4.1 undefined flags of PING", NO_ERROR, lambda _: [raw(6, 0xFE, 0, bytes(8))]),
    Case("4.1 reserved bit of HEADERS and DATA", ANSWERED, lambda c: [_reserved(frame) for frame in call(c)]),
    Case("4.2 DATA of 2^14 bytes", ANSWERED, lambda c: [head(c), body(1, _FILLING)]),
    Case("4.2 DATA of 2^14 + 1 bytes", DIFFERS, lambda c: [head(c), raw(0, 0, 1, bytes(2**14 + 1))]),
    Case("4.2 HEADERS of 2^14 + 1 bytes", FRAME_SIZE, lambda _: [raw(1, 4, 1, bytes(2**14 + 1))]),
    Case("4.3 field block that is not HPACK", COMPRESSION, lambda _: [raw(1, 5, 1, b"\xff" * 6)]),
    Case("4.3 PRIORITY inside a field block", PROTOCOL, _inside_a_field_block(lambda _: h2.PriorityFrame(1))),
    Case("4.3 HEADERS inside a field block", PROTOCOL, _inside_a_field_block(lambda c: head(c, stream=3))),
    # Stream states. HEADERS on a closed stream may be STREAM_CLOSED too.
    Case("5.1 idle: DATA", PROTOCOL, lambda _: [_DATA]),
    Case("5.1 idle: RST_STREAM", PROTOCOL, lambda _: [_RESET]),
    Case("5.1 idle: WINDOW_UPDATE", PROTOCOL, lambda _: [_WINDOW]),
    Case("5.1 idle: CONTINUATION", PROTOCOL, lambda _: [_CONTINUATION]),
    Case("5.1 half-closed (remote): DATA", DIFFERS, lambda c: [*watch(c), _DATA]),
    Case("5.1 half-closed (remote): HEADERS", DIFFERS, lambda c: [*watch(c), head(c)]),
    Case("5.1 half-closed (remote): CONTINUATION", PROTOCOL, lambda c: [*watch(c), _CONTINUATION]),
    Case("5.1 half-closed (remote): WINDOW_UPDATE", NO_ERROR, lambda c: [*watch(c), _WINDOW]),
    Case("5.1 half-closed (remote): RST_STREAM", NO_ERROR, lambda c: [*watch(c), _RESET]),
    Case("5.1 closed by RST_STREAM: HEADERS", NO_ERROR, _after_a_reset(head)),
    Case("5.1 closed by RST_STREAM: CONTINUATION", PROTOCOL, _after_a_reset(lambda _: _CONTINUATION)),
    Case("5.1 closed: HEADERS", NO_ERROR, _after_the_end(head)),
    Case("5.1 closed: CONTINUATION", PROTOCOL, _after_the_end(lambda _: _CONTINUATION)),
    Case("5.1 closed: WINDOW_UPDATE", NO_ERROR, _after_the_end(lambda _: _WINDOW)),
    Case("5.1 closed: RST_STREAM", NO_ERROR, _after_the_end(lambda _: _RESET)),
    Case("6.1 DATA on a stream closed by RST_STREAM", DIFFERS, _after_a_reset(lambda _: _DATA)),
    Case("6.1 DATA on a closed stream", DIFFERS, _after_the_end(lambda _: _DATA)),
    # Stream identifiers, concurrency and priority.
    Case("5.1.1 even stream identifier", PROTOCOL, lambda c: call(c, stream=2), stream=2),
    Case("5.1.1 stream identifier below another", DIFFERS, lambda c: [*call(c, 5), *call(c, 3)], stream=3),
    Case("5.1.1 stream identifiers with gaps", ANSWERED, lambda c: [*call(c, 5), *call(c, 99)], stream=99),
    Case("5.1.1 the last stream identifier", ANSWERED, lambda c: call(c, 2**31 - 1), stream=2**31 - 1),
    Case("5.1.2 more streams than allowed", DIFFERS, _too_many_streams, stream=8193),
    Case(
        "5.3.1 HEADERS that depend on their own stream",
        DIFFERS,
        lambda c: [raw(1, 0x24, 1, b"\0\0\0\1\7" + head(c).data), body()],
    ),
    # Errors and extensions.
    Case("5.4.1 request after a connection error", FRAME_SIZE, lambda c: [raw(6, 0, 0, b"1"), *call(c)]),
    Case("5.5 unknown frame inside a field block", PROTOCOL, _inside_a_field_block(lambda _: raw(0xEE, 0, 0, b""))),
    Case(
        "7 GOAWAY with an unknown error code",
        f"{ANSWERED}, {CLOSED}",
        lambda c: [head(c), h2.GoAwayFrame(0, error_code=0xFF), body()],
    ),
    Case(
        "7 RST_STREAM with an unknown error code", NO_ERROR, lambda c: [head(c), h2.RstStreamFrame(1, error_code=0xFF)]
    ),
]
