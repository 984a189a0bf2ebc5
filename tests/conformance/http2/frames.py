"""Cases of RFC 9113, sections 3 to 7: preface, frames, streams, errors."""

from hyperframe import frame as h2

from tests.conformance.http2.case import (
    ANSWERED,
    CLOSED,
    COMPRESSION,
    DIFFERS,
    FLOW_CONTROL,
    FRAME_SIZE,
    INITIAL_WINDOW,
    MAX_FRAME,
    NO_ERROR,
    PROTOCOL,
    STREAM,
    Case,
    body,
    call,
    head,
    watch,
)
from tests.support.http2_client import PREFACE, raw

_SETTINGS = h2.SettingsFrame(0).serialize()
_CLIENT_HELLO = b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3" + bytes(512)
_DATA = h2.DataFrame(1, b"x")
_RESET = h2.RstStreamFrame(1, error_code=8)
#: One unknown field, which suits every RPC, and fills a DATA frame of 2^14 bytes.
_FILLING = b"\x7a\xf6\xff\x80\0" + bytes(2**14 - 10)


async def _first_frame(client):
    await client.greet().agreed()
    return type(client.frames[0]).__name__


async def _byte_by_byte(client):
    for byte in PREFACE + _SETTINGS + b"".join(frame.serialize() for frame in call(client)):
        client.send(bytes((byte,)))
        await client.writer.drain()
    return []


def _after_the_end(make):
    async def say(client):
        client.send(*call(client))
        await client.answer()
        client.answers.clear()
        return [make(client)]

    return say


def _inside_a_field_block(make):
    def say(client):
        block = head(client).data
        end = h2.ContinuationFrame(1, block[9:], flags=["END_HEADERS"])
        return [h2.HeadersFrame(1, block[:9]), make(client), end, body()]

    return say


_MAX_WINDOW = 2**31 - 1


def _padded(client):
    fields, data = head(client, "PADDED"), body()
    data.flags.add("PADDED")
    fields.pad_length, data.pad_length = 200, 255
    return [fields, data]


def _in_parts(client):
    block = head(client).data
    parts = [block[at : at + 16] for at in range(0, len(block), 16)]
    ends = h2.ContinuationFrame(1, parts[-1], flags=["END_HEADERS"])
    return [h2.HeadersFrame(1, parts[0]), *(h2.ContinuationFrame(1, part) for part in parts[1:-1]), ends, body()]


def _depends_on_itself(client):
    return [raw(1, 0x24, 1, b"\0\0\0\1\7" + head(client).data), body()]


def _goes_away(code):
    return lambda client: [head(client), h2.GoAwayFrame(0, error_code=code), body()]


def _settings(settings):
    return h2.SettingsFrame(0, settings=settings)


async def _acknowledged(client):
    await client.settle()
    client.frames.clear()
    client.send(_settings({INITIAL_WINDOW: 1}), _settings({INITIAL_WINDOW: 2}))
    await client.settle()
    count = sum(isinstance(frame, h2.SettingsFrame) and "ACK" in frame.flags for frame in client.frames)
    return f"{count} acknowledgements"


async def _pongs(client):
    client.send(h2.PingFrame(0, opaque_data=b"12345678"), h2.PingFrame(0, opaque_data=b"87654321", flags=["ACK"]))
    await client.settle()
    return " ".join(pong.decode() for pong in client.pongs if pong in (b"12345678", b"87654321"))


def _sizes(*steps):
    """Call, then send settings or increments of the window; return how many bytes of DATA came after each step."""

    async def say(client):
        sizes = []
        for number, step in enumerate(steps):
            client.send(h2.WindowUpdateFrame(1, step) if isinstance(step, int) else _settings(step))
            client.send(*(call(client) if number == 0 else ()))
            await client.settle()
            sizes.append(sum(len(answer.data) for answer in client.answers.values()) - sum(sizes))
        return str(sizes)

    return say


def _sums(client, stream):
    return [*watch(client), h2.WindowUpdateFrame(stream, _MAX_WINDOW), h2.WindowUpdateFrame(stream, _MAX_WINDOW)]


def _set(settings):
    return lambda client: [_settings(settings), *call(client)]


def _sent(*payload):
    """HEADERS on stream 1, and frames by type, flags, stream and payload."""
    return lambda client: [head(client), *(raw(*frame) for frame in payload)]


async def _exceeded(client):
    """Send a stream more empty requests than its window takes; on another connection, if they were read in between."""
    requests = [raw(0, 0, 1, bytes(2**14 - 4))] * 17  # a request is five zeros
    case = Case("", FLOW_CONTROL, lambda client: [head(client, _path=STREAM), *requests])
    for _ in range(20):
        outcome = await case.observe(client.port, NO_ERROR)  # which does not wait for the end of the stream
        if outcome != NO_ERROR:
            break
    return outcome


CASES = [
    # Connection preface.
    Case("3.4 the first frame of the server is SETTINGS", "SettingsFrame", _first_frame, greets=False),
    Case("3.4 preface and request byte by byte", ANSWERED, _byte_by_byte, greets=False),
    Case("3.4 request of HTTP/1.1", CLOSED, lambda _: [b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"], greets=False),
    Case("3.4 ClientHello of TLS", CLOSED, lambda _: [_CLIENT_HELLO], greets=False),
    # Frames and field blocks.
    Case("4.1 frame of an unknown type", ANSWERED, lambda c: [head(c), raw(0xEE, 0xFF, 1, b"a"), body()]),
    Case("4.2 DATA of 2^14 bytes", ANSWERED, lambda c: [head(c), body(1, _FILLING)]),
    Case("4.2 DATA of 2^14 + 1 bytes", DIFFERS, lambda c: [head(c), raw(0, 0, 1, bytes(2**14 + 1))]),
    Case("4.2 HEADERS of 2^14 + 1 bytes", FRAME_SIZE, lambda _: [raw(1, 4, 1, bytes(2**14 + 1))]),
    Case("4.3 field block that is not HPACK", COMPRESSION, lambda _: [raw(1, 5, 1, b"\xff" * 6)]),
    Case("4.3 PRIORITY inside a field block", PROTOCOL, _inside_a_field_block(lambda _: h2.PriorityFrame(1))),
    # Stream states. HEADERS on a closed stream may be STREAM_CLOSED too.
    Case("5.1 idle: DATA", PROTOCOL, lambda _: [_DATA]),
    Case("5.1 half-closed (remote): DATA", DIFFERS, lambda c: [*watch(c), _DATA]),
    Case("5.1 half-closed (remote): HEADERS", DIFFERS, lambda c: [*watch(c), head(c)]),
    Case("5.1 half-closed (remote): RST_STREAM", NO_ERROR, lambda c: [*watch(c), _RESET]),
    Case("5.1 closed: HEADERS", NO_ERROR, _after_the_end(head)),
    Case("6.1 DATA on a stream closed by RST_STREAM", DIFFERS, lambda c: [head(c), _RESET, _DATA]),
    Case("6.1 DATA on a closed stream", DIFFERS, _after_the_end(lambda _: _DATA)),
    # Stream identifiers, concurrency and priority.
    Case("5.1.1 even stream identifier", PROTOCOL, lambda c: call(c, stream=2), stream=2),
    Case("5.1.1 stream identifier below another", DIFFERS, lambda c: [*call(c, 5), *call(c, 3)], stream=3),
    Case("5.1.1 the last stream identifier", ANSWERED, lambda c: call(c, 2**31 - 1), stream=2**31 - 1),
    Case(
        "5.1.2 more streams than allowed",
        DIFFERS,
        lambda c: [head(c, stream=n) for n in range(1, 8194, 2)],
        stream=8193,
    ),
    Case("5.3.1 HEADERS that depend on their own stream", DIFFERS, _depends_on_itself),
    # Errors and extensions.
    Case("5.4.1 request after a connection error", FRAME_SIZE, lambda c: [raw(6, 0, 0, b"1"), *call(c)]),
    Case("7 GOAWAY with an unknown error code", f"{ANSWERED}, {CLOSED}", _goes_away(0xFF)),
    # The frames.
    Case("6.1 several DATA frames", ANSWERED, _sent((0, 0, 1, b"\0\0"), (0, 0, 1, b""), (0, 1, 1, bytes(3)))),
    Case("6.1 padding", ANSWERED, _padded),
    Case("6.1 padding without its length", DIFFERS, _sent((0, 8, 1, b""))),
    Case("6.3 PRIORITY on stream 0", DIFFERS, lambda _: [raw(2, 0, 0, bytes(5))]),
    Case("6.3 PRIORITY of 4 bytes", DIFFERS, _sent((2, 0, 1, bytes(4)))),
    Case("6.4 RST_STREAM on an open stream", NO_ERROR, _sent((3, 0, 1, b"\0\0\0\x08"))),
    Case("6.5.2 INITIAL_WINDOW_SIZE of 2^31", FLOW_CONTROL, _set({INITIAL_WINDOW: 2**31})),
    Case("6.5.2 the largest values", ANSWERED, _set({MAX_FRAME: 2**24 - 1, INITIAL_WINDOW: _MAX_WINDOW})),
    Case("6.5.3 two SETTINGS in a row", "2 acknowledgements", _acknowledged),
    Case("6.7 PING and an acknowledgement", "12345678", _pongs),
    Case("6.8 GOAWAY while a stream is open", f"{ANSWERED}, {CLOSED}", _goes_away(0)),
    Case("6.9 increment of 0 on the connection", PROTOCOL, _sent((8, 0, 0, bytes(4)))),
    Case("6.9 increment of 0 on a stream", DIFFERS, _sent((8, 0, 1, bytes(4)))),
    Case("6.9.1 window of 1 byte", "[1, 2]", _sizes({INITIAL_WINDOW: 1}, 2)),
    Case("6.9.1 window of the connection above 2^31 - 1", FLOW_CONTROL, lambda c: _sums(c, 0)),
    Case("6.9.1 window of a stream above 2^31 - 1", DIFFERS, lambda c: _sums(c, 1)),
    Case("6.9.1 more DATA than the window of the stream", FLOW_CONTROL, _exceeded),
    Case("6.9.2 a negative window", "[3, 0, 0, 1]", _sizes({INITIAL_WINDOW: 3}, {INITIAL_WINDOW: 2}, 1, 1)),
    Case(
        "6.9.2 SETTINGS that push a window above 2^31 - 1",
        FLOW_CONTROL,
        lambda c: [*watch(c), h2.WindowUpdateFrame(1, _MAX_WINDOW - 2**16), _settings({INITIAL_WINDOW: _MAX_WINDOW})],
    ),
    Case("6.10 field block in many parts", ANSWERED, _in_parts),
]
