"""A raw HTTP/2 client that sends any sequence of frames, and a small gRPC server on nghttp2 to test against."""

import asyncio
from contextlib import asynccontextmanager

import grpc
from hpack import Decoder, Encoder
from hyperframe import frame as h2

from edge.connections.quota import Quota
from edge.http2.messages import prefix
from edge.http2.rpc import Direct
from edge.http2.server import Port, Routes
from edge.rpc.limits import Limits
from edge.rpc.methods import Method, Refused, Status
from edge.serving.statuses import Code
from tests.support.metrics import reached

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: The preface and empty SETTINGS: a connection that is open.
OPENING = PREFACE + b"\0\0\0\x04\0\0\0\0\0"
SECONDS = 10.0
LARGE = 1_000_000


def raw(kind, flags, stream_id, payload):
    """A frame of any type, flags and length, valid or not."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def parsed(data):
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

    def __init__(self, direct=False):
        self.direct = direct
        self.cancelled = 0
        self.running = 0

    def echo(self, request, context, end):
        return asyncio.get_running_loop().call_soon(end, request)

    def blow(self, request, context, end):
        end(bytes(LARGE))

    def abort(self, request, context, end):
        end(Status(Code.ABORTED, request.decode(), (("key", "value"), ("key-bin", b"\0\xff"))))

    def fail(self, request, context, end):
        raise ValueError(request)

    def metadata(self, request, context, end):
        end(repr(dict(context.invocation_metadata())).encode())

    def wait(self, request, context, end):
        self.running += 1
        return asyncio.get_running_loop().call_later(60, end, b"")

    def _cancel_wait(self, timer):
        timer.cancel()
        self.cancelled += 1
        self.running -= 1

    async def chat(self, requests, context):
        while (request := await context.read()) is not None:
            await context.write(request)

    async def count(self, request, context):
        for number in range(int(request)):
            await context.write(b"%d" % number)

    def unary(self):
        starts = (self.echo, self.blow, self.abort, self.fail, self.metadata)
        found = {start.__name__.title(): Direct(start, lambda handle: handle.cancel()) for start in starts}
        return {**found, "Wait": Direct(self.wait, self._cancel_wait)}

    def methods(self):
        found = {
            **{name: Method(_coroutine(direct), bytes, bytes) for name, direct in self.unary().items()},
            "Chat": Method(self.chat, bytes, bytes, request_streaming=True, response_streaming=True),
            "Count": Method(self.count, bytes, bytes, response_streaming=True),
        }
        return {f"/test.Test/{name}": method for name, method in found.items()}


def _coroutine(direct):
    async def method(request, context):
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
async def serving(subject, limits=None, drain_seconds=0.0, quota=None, by_path=True):
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
async def shared(subject):
    """Serve, and answer another client before and after the block; no handler may outlive the block."""
    async with serving(subject) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo = channel.unary_unary("/test.Test/Echo")
        assert await echo(b"before", timeout=SECONDS) == b"before"
        yield port
        assert await echo(b"after", timeout=SECONDS) == b"after"
        await reached(lambda: not subject.running)


class Answer:
    """A response; ``reset`` is the error code of RST_STREAM, and ``fields`` includes trailers."""

    def __init__(self):
        self.fields = {}
        self.data = b""
        self.ended = False
        self.reset = None
        self.frames = 0

    @property
    def messages(self):
        found, rest = [], self.data
        while rest:
            end = 5 + int.from_bytes(rest[1:5], "big")
            found, rest = [*found, rest[5:end]], rest[end:]
        return found

    @property
    def status(self):
        return int(self.fields.get("grpc-status", -1))


class RawClient:
    """A connection for any frames. By itself it only acknowledges SETTINGS and collects frames and responses."""

    def __init__(self, port):
        self.port = port
        self.answers = {}
        self.frames = []
        self.goaway = None
        self.closed = False
        self.encoder = Encoder()
        self.decoder = Decoder()
        self._news = asyncio.Event()

    async def __aenter__(self):
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error):
        self._reading.cancel()
        self.writer.close()
        await asyncio.gather(self._reading, self.writer.wait_closed(), return_exceptions=True)

    def greet(self, settings=None):
        self.writer.write(PREFACE)
        self.send(h2.SettingsFrame(0, settings=settings or {}))
        return self

    async def agreed(self):
        """Wait for the server's SETTINGS, which open the windows that larger requests need."""
        await self.until(lambda: any(isinstance(frame, h2.SettingsFrame) for frame in self.frames))

    def send(self, *frames):
        self.writer.write(b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames))

    def head(self, stream_id, method, *flags, **changed):
        """The HEADERS of a call. A keyword changes or adds a field, with _ for - and for :; None removes the field."""
        fields = {":method": "POST", ":scheme": "http", ":path": f"/test.Test/{method}", ":authority": "test"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        for name, value in changed.items():
            name = f":{name[1:]}" if name.startswith("_") else name.replace("_", "-")
            if value is None:
                del fields[name]
            else:
                fields[name] = value
        return self.fields(stream_id, list(fields.items()), *flags)

    def fields(self, stream_id, fields, *flags):
        return h2.HeadersFrame(stream_id, self.encoder.encode(fields), flags=["END_HEADERS", *flags])

    def body(self, stream_id, message, *flags):
        return h2.DataFrame(stream_id, prefix(message) + message, flags=["END_STREAM", *flags])

    def call(self, stream_id, method, message=b"x", **changed):
        self.send(self.head(stream_id, method, **changed), self.body(stream_id, message))

    async def answer(self, stream_id=1):
        """Wait until the server ends or resets a stream."""
        await self.until(lambda: stream_id in self.answers and self.answers[stream_id].ended)
        return self.answers[stream_id]

    async def until(self, reached):
        async def wait():
            while not reached():
                assert not self.closed, f"the server closed the connection, goaway {self.goaway}"
                self._news.clear()
                await self._news.wait()

        await asyncio.wait_for(wait(), SECONDS)

    async def settle(self, stream_id=None):
        """Wait until the server has handled everything sent so far, and has ended this stream or the connection."""
        if stream_id is not None:
            await self.until(lambda: self.closed or (stream_id in self.answers and self.answers[stream_id].ended))
        for _ in range(2):  # an answer can leave right after the first acknowledgement
            expected = len(self.pongs) + 1
            self.send(h2.PingFrame(0))
            await self.until(lambda expected=expected: self.closed or len(self.pongs) >= expected)

    @property
    def pongs(self):
        pings = [frame for frame in self.frames if isinstance(frame, h2.PingFrame)]
        return [frame.opaque_data for frame in pings if "ACK" in frame.flags]

    async def end(self):
        """Wait until the server closes the connection, and return the error code of its GOAWAY."""
        await asyncio.wait_for(asyncio.wait([self._reading]), SECONDS)
        assert self.closed
        return self.goaway

    async def _read(self):
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

    def _take(self, frame):
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
