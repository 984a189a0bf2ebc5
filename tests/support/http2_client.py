"""A raw HTTP/2 client that sends any sequence of frames, and a small gRPC server on nghttp2 to test against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from hpack import Decoder, Encoder
from hyperframe import frame as h2

from edge.connections.quota import Quota
from edge.http2.messages import prefix
from edge.http2.routes import Direct, Routes
from edge.http2.server import Port
from edge.rpc.limits import Limits
from edge.rpc.methods import Method
from edge.rpc.parsing import Refused, Status
from edge.serving.statuses import Code

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: The preface and empty SETTINGS: a connection that is open.
OPENING = PREFACE + b"\0\0\0\x04\0\0\0\0\0"
SECONDS = 10.0
LARGE = 1_000_000

Fields = list[tuple[str, str]]
End = Callable[[Any], None]


def raw(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """A frame of any type, flags and length, valid or not."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def parsed(data: bytes) -> tuple[list[h2.Frame], bytes]:
    """Return the frames at the beginning of what was received, and the rest."""
    frames, place = [], 0
    while len(data) - place >= 9:
        frame, length = h2.Frame.parse_frame_header(memoryview(data[place : place + 9]))
        end = place + 9 + length
        if len(data) < end:
            break
        frame.parse_body(memoryview(data[place + 9 : end]))
        frames.append(frame)
        place = end
    return frames, data[place:]


class Subject:
    """Methods under ``/test.Test/``; the unary ones are callbacks or coroutines. Counts the handlers of ``Wait``."""

    def __init__(self, direct: bool = False) -> None:
        self.direct = direct
        self.cancelled = 0
        self.running = 0

    def echo(self, request: bytes, context: Any, end: End) -> Any:
        return asyncio.get_running_loop().call_soon(end, request)

    def blow(self, request: bytes, context: Any, end: End) -> None:
        end(bytes(LARGE))

    def abort(self, request: bytes, context: Any, end: End) -> None:
        end(Status(Code.ABORTED, request.decode(), (("key", "value"), ("key-bin", b"\0\xff"))))  # type: ignore[arg-type]

    def fail(self, request: bytes, context: Any, end: End) -> None:
        raise ValueError(request)

    def metadata(self, request: bytes, context: Any, end: End) -> None:
        end(repr(dict(context.invocation_metadata())).encode())

    def wait(self, request: bytes, context: Any, end: End) -> Any:
        self.running += 1
        return asyncio.get_running_loop().call_later(60, end, b"")

    def _cancel_wait(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self.cancelled += 1
        self.running -= 1

    async def chat(self, requests: Any, context: Any) -> None:
        while (request := await context.read()) is not None:
            await context.write(request)

    async def count(self, request: bytes, context: Any) -> None:
        for number in range(int(request)):
            await context.write(b"%d" % number)

    def unary(self) -> dict[str, Direct]:
        starts: tuple[Any, ...] = (self.echo, self.blow, self.abort, self.fail, self.metadata)
        found = {start.__name__.title(): Direct(start, lambda handle: handle.cancel()) for start in starts}
        return {**found, "Wait": Direct(self.wait, self._cancel_wait)}

    def methods(self) -> dict[str, Method]:
        found = {
            **{name: Method(_coroutine(direct), bytes, bytes) for name, direct in self.unary().items()},
            "Chat": Method(self.chat, bytes, bytes, request_streaming=True, response_streaming=True),
            "Count": Method(self.count, bytes, bytes, response_streaming=True),
        }
        return {f"/test.Test/{name}": method for name, method in found.items()}


def _coroutine(direct: Direct) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def method(request: bytes, context: Any) -> Any:
        outcome = asyncio.get_running_loop().create_future()
        handle = direct.start(request, context, outcome.set_result)
        try:
            result = await outcome
        except asyncio.CancelledError:
            direct.cancel(handle)
            raise
        if isinstance(result, Status):
            raise Refused(*result)
        return result

    return method


@asynccontextmanager
async def serving(
    subject: Subject,
    limits: Limits | None = None,
    drain_seconds: float = 0.0,
    quota: Quota | None = None,
    by_path: bool = True,
) -> AsyncIterator[int]:
    directs = subject.unary() if subject.direct else {}
    limits = limits or Limits()
    direct = {f"/test.Test/{name}": direct for name, direct in directs.items()}
    methods = subject.methods()
    routes = Routes(lambda path, _: methods.get(path), limits, by_path=by_path, direct=direct)
    port = Port(routes, limits, quota or Quota(2**27, 2**27))
    try:
        yield await port.open("127.0.0.1", 0)
    finally:
        await port.drain(drain_seconds)


@asynccontextmanager
async def shared(subject: Subject) -> AsyncIterator[int]:
    """Serve, and answer another client before and after the block; no handler may outlive the block."""
    async with serving(subject) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo = channel.unary_unary("/test.Test/Echo")
        assert await echo(b"before", timeout=SECONDS) == b"before"
        yield port
        assert await echo(b"after", timeout=SECONDS) == b"after"
        await reached(lambda: not subject.running)


async def reached(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), SECONDS)


class Answer:
    """A response; ``reset`` is the error code of RST_STREAM, and ``fields`` includes trailers."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.data = b""
        self.ended = False
        self.reset: int | None = None
        self.frames = 0

    @property
    def messages(self) -> list[bytes]:
        found, rest = [], self.data
        while rest:
            end = 5 + int.from_bytes(rest[1:5], "big")
            found, rest = [*found, rest[5:end]], rest[end:]
        return found

    @property
    def status(self) -> int:
        return int(self.fields.get("grpc-status", -1))


class RawClient:
    """A connection for any frames. By itself it only acknowledges SETTINGS and collects frames and responses."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: dict[int, Answer] = {}
        self.frames: list[h2.Frame] = []
        self.goaway: int | None = None
        self.closed = False
        self.encoder = Encoder()
        self.decoder = Decoder()
        self._news = asyncio.Event()

    async def __aenter__(self) -> RawClient:
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._reading.cancel()
        self.writer.close()
        await asyncio.gather(self._reading, self.writer.wait_closed(), return_exceptions=True)

    def greet(self, settings: dict[int, int] | None = None) -> RawClient:
        self.writer.write(PREFACE)
        self.send(h2.SettingsFrame(0, settings=settings or {}))
        return self

    async def agreed(self) -> None:
        """Wait for the server's SETTINGS, which open the windows that larger requests need."""
        await self.until(lambda: any(isinstance(frame, h2.SettingsFrame) for frame in self.frames))

    def send(self, *frames: h2.Frame | bytes) -> None:
        self.writer.write(b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames))

    def head(self, stream_id: int, method: str, *flags: str, **changed: str | None) -> h2.HeadersFrame:
        """The HEADERS of a call. A keyword changes or adds a field, with _ for - and for :; None removes the field."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/test.Test/{method}",
            ":authority": "test",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        for name, value in changed.items():
            name = f":{name[1:]}" if name.startswith("_") else name.replace("_", "-")
            if value is None:
                del fields[name]
            else:
                fields[name] = value
        return self.fields(stream_id, list(fields.items()), *flags)

    def fields(self, stream_id: int, fields: Fields, *flags: str) -> h2.HeadersFrame:
        return h2.HeadersFrame(stream_id, self.encoder.encode(fields), flags=["END_HEADERS", *flags])

    def body(self, stream_id: int, message: bytes, *flags: str) -> h2.DataFrame:
        return h2.DataFrame(stream_id, prefix(message) + message, flags=["END_STREAM", *flags])

    def call(self, stream_id: int, method: str, message: bytes = b"x", **changed: str | None) -> None:
        self.send(self.head(stream_id, method, **changed), self.body(stream_id, message))

    async def answer(self, stream_id: int = 1) -> Answer:
        """Wait until the server ends or resets a stream."""
        await self.until(lambda: stream_id in self.answers and self.answers[stream_id].ended)
        return self.answers[stream_id]

    async def until(self, reached: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not reached():
                assert not self.closed, f"the server closed the connection, goaway {self.goaway}"
                self._news.clear()
                await self._news.wait()

        await asyncio.wait_for(wait(), SECONDS)

    async def settle(self, stream_id: int | None = None) -> None:
        """Wait until the server has handled everything sent so far, and has ended this stream or the connection."""
        if stream_id is not None:
            await self.until(lambda: self.closed or (stream_id in self.answers and self.answers[stream_id].ended))
        for _ in range(2):  # an answer can leave right after the first acknowledgement
            expected = len(self.pongs) + 1
            self.send(h2.PingFrame(0))
            await self.until(lambda expected=expected: self.closed or len(self.pongs) >= expected)  # type: ignore[misc]

    @property
    def pongs(self) -> list[bytes]:
        pings = [frame for frame in self.frames if isinstance(frame, h2.PingFrame)]
        return [frame.opaque_data for frame in pings if "ACK" in frame.flags]

    async def end(self) -> int | None:
        """Wait until the server closes the connection, and return the error code of its GOAWAY."""
        await asyncio.wait_for(asyncio.wait([self._reading]), SECONDS)
        assert self.closed
        return self.goaway

    async def _read(self) -> None:
        data = b""
        try:
            while received := await self._reader.read(65536):
                frames, data = parsed(data + received)
                for frame in frames:
                    self._take(frame)
                self._news.set()
        except ConnectionError:
            pass
        self.closed = True
        self._news.set()

    def _take(self, frame: h2.Frame) -> None:
        self.frames.append(frame)
        if isinstance(frame, h2.SettingsFrame) and "ACK" not in frame.flags:
            self.send(h2.SettingsFrame(0, flags=["ACK"]))
        if isinstance(frame, h2.GoAwayFrame):
            self.goaway = frame.error_code
        if not frame.stream_id:
            return
        answer = self.answers.setdefault(frame.stream_id, Answer())
        answer.frames += 1
        if isinstance(frame, h2.HeadersFrame | h2.ContinuationFrame):
            answer.fields.update((str(name), str(value)) for name, value in self.decoder.decode(frame.data))
        if isinstance(frame, h2.DataFrame):
            answer.data += frame.data
        if isinstance(frame, h2.RstStreamFrame):
            answer.reset, answer.ended = frame.error_code, True
        answer.ended = answer.ended or "END_STREAM" in frame.flags
