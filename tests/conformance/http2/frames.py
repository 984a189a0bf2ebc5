"""Cases of RFC 9113, section 6: the frames."""

from __future__ import annotations

from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.conformance.http2.case import (
    ANSWERED,
    CLOSED,
    ENABLE_PUSH,
    GOAWAY,
    INITIAL_WINDOW,
    MAX_FRAME,
    NO_ERROR,
    Case,
    as_connection_error,
    body,
    call,
    head,
    watch,
)
from tests.support.http2_client import RawClient, raw

_PROTOCOL = GOAWAY("PROTOCOL_ERROR")
_FRAME_SIZE = GOAWAY("FRAME_SIZE_ERROR")
_FLOW_CONTROL = GOAWAY("FLOW_CONTROL_ERROR")
_MAX_WINDOW = 2**31 - 1
_PADDING = "A deviation in the code only: nghttp2 sends what 6.1 asks for when padding does not fit."
_DEPRECATED = "A deviation: RFC 9113 deprecates PRIORITY, and nghttp2 skips it unread."


def _padded(client: RawClient) -> list[Frame]:
    fields, data = head(client, "PADDED"), body()
    data.flags.add("PADDED")
    fields.pad_length, data.pad_length = 200, 255
    return [fields, data]


def _prioritised(client: RawClient, weight: int, depends_on: int = 0, exclusive: bool = False) -> list[Frame]:
    fields = head(client, "PRIORITY")
    fields.stream_weight, fields.depends_on, fields.exclusive = weight, depends_on, exclusive
    return [fields, body()]


def _in_parts(client: RawClient, size: int) -> list[Frame]:
    """A call whose field block is cut into parts."""
    block = head(client).data
    parts = [block[at : at + size] for at in range(0, len(block), size)]
    ends = ContinuationFrame(1, parts[-1], flags=["END_HEADERS"])
    return [HeadersFrame(1, parts[0]), *(ContinuationFrame(1, part) for part in parts[1:-1]), ends, body()]


def _settings(settings: dict[int, int]) -> SettingsFrame:
    return SettingsFrame(0, settings=settings)


async def _acknowledged(client: RawClient) -> str:
    """Settings after the first ones."""
    await client.settle()
    client.frames.clear()
    client.send(_settings({INITIAL_WINDOW: 1}), _settings({INITIAL_WINDOW: 2}))
    await client.settle()
    count = sum(isinstance(frame, SettingsFrame) and "ACK" in frame.flags for frame in client.frames)
    return f"{count} acknowledgements"


async def _ponged(client: RawClient) -> str:
    client.send(PingFrame(0, opaque_data=b"12345678"))
    await client.settle()
    return f"acknowledged with {client.pongs[0].decode()}"


async def _pong(client: RawClient) -> str:
    client.send(PingFrame(0, opaque_data=b"12345678", flags=["ACK"]))
    await client.settle()
    return "acknowledged" if b"12345678" in client.pongs else "ignored"


async def _sizes(client: RawClient, *steps: tuple[Frame | bytes, ...]) -> str:
    """Send each step once the server is at rest, and return how many bytes of the answer came after each."""
    sizes: list[int] = []
    for step in steps:
        client.send(*step)
        await client.settle()
        sizes.append(sum(len(answer.data) for answer in client.answers.values()) - sum(sizes))
    return f"{sizes} bytes of DATA"


def _sums(client: RawClient, stream: int) -> list[Frame]:
    return [*watch(client), WindowUpdateFrame(stream, _MAX_WINDOW), WindowUpdateFrame(stream, _MAX_WINDOW)]


CASES = [
    # 6.1 DATA.
    Case(
        "6.1",
        "several DATA frames",
        lambda c: [head(c), DataFrame(1, b"\0\0"), DataFrame(1), raw(0, 1, 1, b"\0\0\0")],
        ANSWERED,
    ),
    Case("6.1", "padding", _padded, ANSWERED),
    Case("6.1", "DATA on stream 0", lambda _: [raw(0, 0, 0, b"x")], _PROTOCOL),
    Case("6.1", "as much padding as payload", lambda c: [head(c), raw(0, 8, 1, b"\5\0\0\0\0")], _PROTOCOL),
    Case("6.1", "padding without its length", lambda c: [head(c), raw(0, 8, 1, b"")], _FRAME_SIZE, _PROTOCOL, _PADDING),
    # 6.2 HEADERS.
    Case("6.2", "HEADERS on stream 0", lambda c: [raw(1, 4, 0, head(c).data)], _PROTOCOL),
    Case("6.2", "more padding than payload", lambda c: [raw(1, 0xC, 1, b"\xff" + head(c).data)], _PROTOCOL),
    Case("6.2", "priority without its five bytes", lambda _: [raw(1, 0x24, 1, b"\0\0\0")], _FRAME_SIZE),
    # 6.3 PRIORITY.
    Case("6.3", "weight 1", lambda c: _prioritised(c, 0), ANSWERED),
    Case("6.3", "weight 256", lambda c: _prioritised(c, 255), ANSWERED),
    Case(
        "6.3",
        "dependency on an idle stream",
        lambda c: [PriorityFrame(5, depends_on=3), *_prioritised(c, 9, 5)],
        ANSWERED,
    ),
    Case("6.3", "exclusive dependency", lambda c: _prioritised(c, 9, 5, True), ANSWERED),
    Case("6.3", "PRIORITY on stream 0", lambda _: [raw(2, 0, 0, bytes(5))], _PROTOCOL, NO_ERROR, _DEPRECATED),
    as_connection_error("6.3", "PRIORITY of 4 bytes", lambda c: [head(c), raw(2, 0, 1, bytes(4))], "FRAME_SIZE_ERROR"),
    # 6.4 RST_STREAM.
    Case("6.4", "RST_STREAM on an open stream", lambda c: [head(c), RstStreamFrame(1, error_code=8)], NO_ERROR),
    Case("6.4", "RST_STREAM on stream 0", lambda _: [raw(3, 0, 0, bytes(4))], _PROTOCOL),
    Case("6.4", "RST_STREAM of 3 bytes", lambda c: [head(c), raw(3, 0, 1, bytes(3))], _FRAME_SIZE),
    # 6.5 SETTINGS.
    Case("6.5", "acknowledgement with a payload", lambda _: [raw(4, 1, 0, bytes(6))], _FRAME_SIZE),
    Case("6.5", "SETTINGS on stream 1", lambda _: [raw(4, 0, 1, b"")], _PROTOCOL),
    Case("6.5", "SETTINGS of 5 bytes", lambda _: [raw(4, 0, 0, bytes(5))], _FRAME_SIZE),
    Case("6.5.2", "ENABLE_PUSH of 2", lambda _: [_settings({ENABLE_PUSH: 2})], _PROTOCOL),
    Case("6.5.2", "INITIAL_WINDOW_SIZE of 2^31", lambda _: [_settings({INITIAL_WINDOW: 2**31})], _FLOW_CONTROL),
    Case("6.5.2", "MAX_FRAME_SIZE of 2^14 - 1", lambda _: [_settings({MAX_FRAME: 2**14 - 1})], _PROTOCOL),
    Case("6.5.2", "MAX_FRAME_SIZE of 2^24", lambda _: [_settings({MAX_FRAME: 2**24})], _PROTOCOL),
    Case(
        "6.5.2",
        "the largest values",
        lambda c: [_settings({MAX_FRAME: 2**24 - 1, INITIAL_WINDOW: _MAX_WINDOW}), *call(c)],
        ANSWERED,
    ),
    Case("6.5.2", "unknown setting", lambda c: [_settings({0xFF: 1}), *call(c)], ANSWERED),
    Case("6.5.3", "two SETTINGS in a row", _acknowledged, "2 acknowledgements"),
    Case(
        "6.5.3",
        "one setting twice in a frame",
        lambda c: _sizes(c, (raw(4, 0, 0, b"\0\4\0\0\0\1\0\4\0\0\0\2"), *call(c))),
        "[2] bytes of DATA",
    ),
    # 6.6 PUSH_PROMISE, which only servers may send.
    Case("6.6", "PUSH_PROMISE", lambda c: [head(c), PushPromiseFrame(1, 2, b"", flags=["END_HEADERS"])], _PROTOCOL),
    # 6.7 PING.
    Case("6.7", "PING", _ponged, "acknowledged with 12345678"),
    Case("6.7", "PING that is an acknowledgement", _pong, "ignored"),
    Case("6.7", "PING on stream 1", lambda _: [raw(6, 0, 1, bytes(8))], _PROTOCOL),
    Case("6.7", "PING of 7 bytes", lambda _: [raw(6, 0, 0, bytes(7))], _FRAME_SIZE),
    # 6.8 GOAWAY.
    Case("6.8", "GOAWAY while a stream is open", lambda c: [head(c), GoAwayFrame(0), body()], f"{ANSWERED}, {CLOSED}"),
    Case("6.8", "GOAWAY on stream 1", lambda _: [raw(7, 0, 1, bytes(8))], _PROTOCOL),
    Case("6.8", "GOAWAY of 4 bytes", lambda _: [raw(7, 0, 0, bytes(4))], _FRAME_SIZE),
    # 6.9 WINDOW_UPDATE.
    Case("6.9", "increment of 0 on the connection", lambda _: [raw(8, 0, 0, bytes(4))], _PROTOCOL),
    as_connection_error(
        "6.9", "increment of 0 on a stream", lambda c: [head(c), raw(8, 0, 1, bytes(4))], "PROTOCOL_ERROR"
    ),
    Case("6.9", "WINDOW_UPDATE of 3 bytes", lambda _: [raw(8, 0, 0, bytes(3))], _FRAME_SIZE),
    Case("6.9", "WINDOW_UPDATE on the connection", lambda c: [WindowUpdateFrame(0, 9), *call(c)], ANSWERED),
    Case("6.9", "WINDOW_UPDATE on a stream", lambda c: [head(c), WindowUpdateFrame(1, 9), body()], ANSWERED),
    Case(
        "6.9.1",
        "window of 1 byte",
        lambda c: _sizes(c, (_settings({INITIAL_WINDOW: 1}), *call(c)), (WindowUpdateFrame(1, 2),)),
        "[1, 2] bytes of DATA",
    ),
    Case("6.9.1", "window of the connection above 2^31 - 1", lambda c: _sums(c, 0), _FLOW_CONTROL),
    as_connection_error("6.9.1", "window of a stream above 2^31 - 1", lambda c: _sums(c, 1), "FLOW_CONTROL_ERROR"),
    Case(
        "6.9.1",
        "more DATA than the window of the stream",
        lambda c: [head(c), *(DataFrame(1, b"\0\1\0\0\0" + bytes(2**14 - 5)) for _ in range(17))],
        _FLOW_CONTROL,
    ),
    Case(
        "6.9.2",
        "SETTINGS that open the window of a waiting stream",
        lambda c: _sizes(c, (_settings({INITIAL_WINDOW: 0}), *call(c)), (_settings({INITIAL_WINDOW: 1}),)),
        "[0, 1] bytes of DATA",
    ),
    Case(
        "6.9.2",
        "SETTINGS that make a window negative",
        lambda c: _sizes(
            c,
            (_settings({INITIAL_WINDOW: 3}), *call(c)),
            (_settings({INITIAL_WINDOW: 2}),),
            (WindowUpdateFrame(1, 1),),
            (WindowUpdateFrame(1, 1),),
        ),
        "[3, 0, 0, 1] bytes of DATA",
    ),
    Case(
        "6.9.2",
        "SETTINGS that push a window above 2^31 - 1",
        lambda c: [*watch(c), WindowUpdateFrame(1, _MAX_WINDOW - 2**16), _settings({INITIAL_WINDOW: _MAX_WINDOW})],
        _FLOW_CONTROL,
    ),
    # 6.10 CONTINUATION.
    Case("6.10", "field block in two parts", lambda c: _in_parts(c, 50), ANSWERED),
    Case("6.10", "field block in many parts", lambda c: _in_parts(c, 16), ANSWERED),
    Case(
        "6.10",
        "empty CONTINUATION",
        lambda c: [HeadersFrame(1, head(c).data), ContinuationFrame(1, b"", flags=["END_HEADERS"]), body()],
        ANSWERED,
    ),
    Case(
        "6.10",
        "CONTINUATION, then DATA",
        lambda c: [*_in_parts(c, 50)[:1], ContinuationFrame(1, b""), body()],
        _PROTOCOL,
    ),
    Case("6.10", "CONTINUATION on stream 0", lambda c: [*_in_parts(c, 50)[:1], raw(9, 4, 0, b"")], _PROTOCOL),
    Case("6.10", "CONTINUATION on another stream", lambda c: [*_in_parts(c, 50)[:1], raw(9, 4, 3, b"")], _PROTOCOL),
    Case("6.10", "CONTINUATION after END_HEADERS", lambda c: [head(c), raw(9, 4, 1, b"")], _PROTOCOL),
    Case(
        "6.10",
        "CONTINUATION after CONTINUATION with END_HEADERS",
        lambda c: [*_in_parts(c, 50)[:-1], raw(9, 4, 1, b"")],
        _PROTOCOL,
    ),
    Case("6.10", "CONTINUATION after DATA", lambda c: [head(c), DataFrame(1, b""), raw(9, 4, 1, b"")], _PROTOCOL),
]
