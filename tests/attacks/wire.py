"""Raw connections that send whatever an attack says, as far and as long as the server takes it."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from hpack import Encoder
from hyperframe import frame as h2

from edge.protocol import INFERENCE
from tests.attacks.witness import HOST
from tests.support.http2_client import PREFACE, raw

#: No write waits longer for the server.
SECONDS = 5.0
HEALTH = "grpc.health.v1.Health"
INFER = f"/{INFERENCE}/ModelInfer"
_FRAME_BYTES = 16384


def connect(port: int, context: ssl.SSLContext | None = None) -> socket.socket:
    """Return a connection whose reads and writes wait for :data:`SECONDS` at most."""
    made = socket.create_connection((HOST, port), timeout=SECONDS)
    return context.wrap_socket(made, server_hostname=HOST) if context else made


def until(seconds: float) -> Iterator[int]:
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        yield count
        count += 1


def frames(*made: h2.Frame) -> bytes:
    return b"".join(frame.serialize() for frame in made)


def message(content: bytes, compressed: bool = False) -> bytes:
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


class Peer:
    """A connection of HTTP/2. Reading, it acknowledges SETTINGS and follows the windows that the server grants."""

    def __init__(
        self, port: int, settings: dict[int, int] | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        self.socket = connect(port, context)
        self._end = time.monotonic() + SECONDS
        self.encoder = Encoder()
        self._next = 1
        self._received = b""
        self._window = self._initial = 65535
        self._windows: dict[int, int] = {}
        self._blocks: dict[tuple[tuple[str, str], ...], bytes] = {}
        self._table: list[object] = []
        self._agreed = False
        self.socket.sendall(PREFACE + frames(h2.SettingsFrame(0, settings=settings or {})))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def agree(self) -> None:
        """Read until the server has sent its SETTINGS."""
        while not self._agreed:
            self.read(0.1)

    def head(self, path: str, *more: tuple[str, str]) -> tuple[int, bytes]:
        """Return the number of a new stream, and its HEADERS."""
        stream, self._next = self._next, self._next + 2
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        block = self.encode(*fields.items(), *more)
        return stream, raw(1, 4, stream, block)

    def encode(self, *fields: tuple[str, str]) -> bytes:
        block = self._blocks.get(fields)
        if block is None:
            block = self.encoder.encode(fields)
            table = list(self.encoder.header_table.dynamic_entries)
            if table == self._table:  # the next block of these fields is the same
                self._blocks[fields] = block
            else:
                self._table = table
                self._blocks.clear()
        return block

    def call(
        self, path: str, content: bytes, *more: tuple[str, str], compressed: bool = False, end: bool = True
    ) -> int:
        """Send a call with one message, as the windows allow."""
        stream, head = self.head(path, *more)
        self.write(head)
        self.send(stream, message(content, compressed), end)
        return stream

    def send(self, stream: int, data: bytes, end: bool = True) -> None:
        self._windows.setdefault(stream, self._initial)
        place = 0
        while place < len(data):
            room = min(self._window, self._windows[stream], _FRAME_BYTES, len(data) - place)
            if room <= 0:
                self.read(0.1)
                continue
            part, place = data[place : place + room], place + room
            self._window -= room
            self._windows[stream] -= room
            last = place == len(data)
            self.write(h2.DataFrame(stream, part, flags=["END_STREAM"] if end and last else []).serialize())

    def read(self, seconds: float = 0.0) -> None:
        """Read what the server has sent, and wait for some of it for so long.

        Raises:
            TimeoutError: the connection is older than :data:`SECONDS`.
        """
        if time.monotonic() > self._end:
            raise TimeoutError
        while select.select([self.socket], [], [], seconds)[0]:
            received = self.socket.recv(262144)
            if not received:
                raise ConnectionResetError
            self._received += received
            self._take()
            seconds = 0.0

    def stay(self, seconds: float) -> None:
        """Read for so long, or until the server closes the connection."""
        with suppress(OSError):
            for _ in until(seconds):
                self.read(0.1)

    def _take(self) -> None:
        place, data = 0, self._received
        while len(data) - place >= 9:
            frame, length = h2.Frame.parse_frame_header(memoryview(data[place : place + 9]))
            if len(data) - place < 9 + length:
                break
            if isinstance(frame, h2.SettingsFrame | h2.WindowUpdateFrame):
                frame.parse_body(memoryview(data[place + 9 : place + 9 + length]))
                self._adopt(frame)
            place += 9 + length
        self._received = data[place:]

    def _adopt(self, frame: h2.Frame) -> None:
        if isinstance(frame, h2.WindowUpdateFrame):
            if frame.stream_id == 0:
                self._window += frame.window_increment
            elif frame.stream_id in self._windows:
                self._windows[frame.stream_id] += frame.window_increment
        elif isinstance(frame, h2.SettingsFrame) and "ACK" not in frame.flags:
            initial = frame.settings.get(h2.SettingsFrame.INITIAL_WINDOW_SIZE, self._initial)
            self._windows = {stream: window + initial - self._initial for stream, window in self._windows.items()}
            self._initial, self._agreed = initial, True
            self.write(frames(h2.SettingsFrame(0, flags=["ACK"])))


def flood(port: int, data: bytes, seconds: float = 0.5) -> None:
    """Send frames again and again over new connections; each is used for as long as it lasts, and reads nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError), Peer(port) as peer:
            while time.monotonic() < end:
                peer.write(data)


def stay(connection: socket.socket, seconds: float) -> bytes:
    """Read for so long, or until the server closes the connection; return the first bytes."""
    received = b""
    connection.settimeout(seconds)
    end = time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < end and (data := connection.recv(65536)):
            received = received[:65536] + data
    return received


def http_request(start: str, headers: Iterable[str] = (), body: bytes = b"") -> bytes:
    """Return a request; ``start`` is its method and path."""
    return "\r\n".join([f"{start} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode() + body
