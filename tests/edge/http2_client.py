"""A client that sends whatever frames it is told to, and a server to send them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import grpc
from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
)

from edge.http2.messages import prefix
from edge.http2.port import Port
from edge.http2.routes import AtOnce, Routes
from edge.rpc.limits import Limits

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SECONDS = 10.0
LARGE = 1_000_000

Fields = list[tuple[str, str]]
Unary = Callable[[bytes, Any], Awaitable[bytes]]


class Subject:
    """Methods that do what they are called, under ``/test.Test/``; ``cancelled`` counts those that were given up.

    Args:
        at_once: whether what can be answered without a task is.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.cancelled = 0
        self.running = 0

    async def echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def blow(self, request: bytes, context: Any) -> bytes:
        return bytes(LARGE)

    async def abort(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, request.decode(), (("key", "value"), ("key-bin", b"\0\xff")))
        return b""

    async def fail(self, request: bytes, context: Any) -> bytes:
        raise ValueError(request)

    async def metadata(self, request: bytes, context: Any) -> bytes:
        return repr(dict(context.invocation_metadata())).encode()

    async def wait(self, request: bytes, context: Any) -> bytes:
        self.running += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return b""

    async def chat(self, requests: Any, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(request)

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    def quick(self) -> dict[Any, AtOnce]:
        """What answers at once, by the method that it stands for."""

        def fail(request: bytes, context: Any) -> bytes | None:
            if request == b"later":
                return None
            raise ValueError(request)

        def metadata(request: bytes, context: Any) -> bytes:
            return repr(dict(context.invocation_metadata())).encode()

        if not self.at_once:
            return {}
        return {
            self.echo: lambda request, context: request,
            self.blow: lambda request, context: bytes(LARGE),
            self.fail: fail,
            self.metadata: metadata,
            self.wait: lambda request, context: None,
            self.abort: lambda request, context: None,
        }

    def methods(self) -> dict[str, Any]:
        unary = (self.echo, self.blow, self.abort, self.fail, self.metadata, self.wait)
        return {
            **{method.__name__.title(): grpc.unary_unary_rpc_method_handler(method) for method in unary},
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
        }


@asynccontextmanager
async def serving(subject: Subject, limits: Limits | None = None, drain_seconds: float = 0.0) -> AsyncIterator[int]:
    """Serve on nghttp2, and yield the port."""
    routes = Routes(by_path=True, at_once=subject.quick())
    routes.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", _raw(subject.methods())),))
    port = Port(routes, limits or Limits())
    try:
        yield await port.open("127.0.0.1", 0)
    finally:
        await port.drain(drain_seconds)


def _raw(methods: dict[str, Any]) -> dict[str, Any]:
    """Handlers whose messages are bytes. grpcio's own server takes None for that; ours is told to leave them alone."""
    return {
        name: handler._replace(request_deserializer=bytes, response_serializer=bytes)
        for name, handler in methods.items()
    }


class Answer:
    """What came back on a stream: header fields, messages, how it ended."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.data = b""
        self.ended = False
        self.reset: int | None = None

    @property
    def messages(self) -> list[bytes]:
        found, rest = [], self.data
        while rest:
            length = int.from_bytes(rest[1:5], "big")
            found.append(rest[5 : 5 + length])
            rest = rest[5 + length :]
        return found

    @property
    def status(self) -> int:
        return int(self.fields.get("grpc-status", -1))


class RawClient:
    """A connection. It acknowledges settings and collects answers; windows it opens only when it is told to.

    ``goaway`` is the error code of the server's farewell; ``closed`` says that it hung up.
    """

    def __init__(self, port: int, *, acknowledges: bool = True) -> None:
        self._port = port
        self._acknowledges = acknowledges
        self.answers: dict[int, Answer] = {}
        self.frames: list[Frame] = []
        self.goaway: int | None = None
        self.closed = False
        self.encoder = Encoder()
        self._decoder = Decoder()
        self._news = asyncio.Event()

    async def __aenter__(self) -> RawClient:
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        self.writer.close()
        await asyncio.gather(self._reading, self._hung_up(), return_exceptions=True)

    async def _hung_up(self) -> None:
        await self.writer.wait_closed()

    def greet(self, settings: dict[int, int] | None = None) -> RawClient:
        self.writer.write(PREFACE)
        self.send(SettingsFrame(0, settings=settings or {}))
        return self

    async def agreed(self) -> None:
        """Wait until the server's settings hold, without which a client may send little."""
        await self.until(lambda: any(isinstance(frame, SettingsFrame) for frame in self.frames))

    def send(self, *frames: Frame) -> None:
        self.writer.write(b"".join(frame.serialize() for frame in frames))

    def head(self, stream_id: int, method: str, *flags: str, **changed: str | None) -> HeadersFrame:
        """The frame that begins a call; a field is changed by its name with _ for -, and left out by None."""
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
        return HeadersFrame(stream_id, self.encoder.encode(list(fields.items())), flags=["END_HEADERS", *flags])

    def body(self, stream_id: int, message: bytes, *flags: str) -> DataFrame:
        return DataFrame(stream_id, prefix(message) + message, flags=["END_STREAM", *flags])

    def call(self, stream_id: int, method: str, message: bytes = b"x", **changed: str | None) -> None:
        self.send(self.head(stream_id, method, **changed), self.body(stream_id, message))

    async def answer(self, stream_id: int = 1) -> Answer:
        """Wait until a stream has ended in some way."""
        await self.until(lambda: stream_id in self.answers and self.answers[stream_id].ended)
        return self.answers[stream_id]

    async def until(self, reached: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not reached():
                assert not self.closed, f"the server hung up, goaway {self.goaway}"
                self._news.clear()
                await self._news.wait()

        await asyncio.wait_for(wait(), SECONDS)

    async def end(self) -> int | None:
        """Wait until the server hangs up, and return the error code of its farewell."""
        await asyncio.wait_for(asyncio.wait([self._reading]), SECONDS)
        assert self.closed
        return self.goaway

    async def _read(self) -> None:
        data = b""
        try:
            while received := await self._reader.read(65536):
                data += received
                while len(data) >= 9:
                    frame, length = Frame.parse_frame_header(memoryview(data[:9]))
                    if len(data) < 9 + length:
                        break
                    frame.parse_body(memoryview(data[9 : 9 + length]))
                    data = data[9 + length :]
                    self._take(frame)
                self._news.set()
        except ConnectionError:
            pass
        self.closed = True
        self._news.set()

    def _take(self, frame: Frame) -> None:
        self.frames.append(frame)
        if self._acknowledges and isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            self.send(SettingsFrame(0, flags=["ACK"]))
        if isinstance(frame, GoAwayFrame):
            self.goaway = frame.error_code
        if not frame.stream_id:
            return
        answer = self.answers.setdefault(frame.stream_id, Answer())
        if isinstance(frame, HeadersFrame | ContinuationFrame):
            answer.fields.update((str(name), str(value)) for name, value in self._decoder.decode(frame.data))
        if isinstance(frame, DataFrame):
            answer.data += frame.data
        if isinstance(frame, RstStreamFrame):
            answer.reset, answer.ended = frame.error_code, True
        answer.ended = answer.ended or "END_STREAM" in frame.flags
