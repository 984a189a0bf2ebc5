"""Raw connections that send whatever an attack says, as far and as long as the server takes it."""

import select
import socket
import time
from contextlib import ExitStack, suppress

from hpack import Encoder
from hyperframe import frame as h2

from edge.protocol import INFERENCE
from tests.attacks.witness import HOST
from tests.support.http2_client import PREFACE, parsed, raw

#: No write waits longer for the server.
SECONDS = 5.0
HEALTH = "grpc.health.v1.Health"
INFER = f"/{INFERENCE}/ModelInfer"
_FRAME_BYTES = 16384


def connect(port):
    """Return a connection whose reads and writes wait for :data:`SECONDS` at most."""
    return socket.create_connection((HOST, port), timeout=SECONDS)


def until(seconds):
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        yield count
        count += 1


def message(content, compressed=False):
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


class Peer:
    """A connection of HTTP/2. Reading, it acknowledges SETTINGS and follows the windows that the server grants."""

    def __init__(self, port, settings=None):
        self.socket = connect(port)
        self._end = time.monotonic() + SECONDS
        self.encoder = Encoder()
        self._next = 1
        self._received = b""
        self._window = self._initial = 65535
        self._windows = {}
        self._blocks = {}
        self._table = []
        self._agreed = False
        self.socket.sendall(PREFACE + h2.SettingsFrame(0, settings=settings or {}).serialize())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.socket.close()

    def write(self, data):
        self.socket.sendall(data)

    def agree(self):
        while not self._agreed:
            self.read(0.1)
        return self

    def head(self, path, *more):
        """Return the number of a new stream, and its HEADERS."""
        stream, self._next = self._next, self._next + 2
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        block = self.encode(*fields.items(), *more)
        return stream, raw(1, 4, stream, block)

    def encode(self, *fields):
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

    def call(self, path, content, *more, compressed=False):
        """Send a call with one message, as the windows allow."""
        stream, head = self.head(path, *more)
        self.write(head)
        self.send(stream, message(content, compressed))

    def send(self, stream, data, end=True):
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

    def read(self, seconds=0.0):
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

    def stay(self, seconds):
        """Read for so long, or until the server closes the connection."""
        with suppress(OSError):
            for _ in until(seconds):
                self.read(0.1)

    def _take(self):
        frames, self._received = parsed(self._received)
        for frame in frames:
            self._adopt(frame)

    def _adopt(self, frame):
        if isinstance(frame, h2.WindowUpdateFrame):
            if frame.stream_id == 0:
                self._window += frame.window_increment
            elif frame.stream_id in self._windows:
                self._windows[frame.stream_id] += frame.window_increment
        elif isinstance(frame, h2.SettingsFrame) and "ACK" not in frame.flags:
            initial = frame.settings.get(h2.SettingsFrame.INITIAL_WINDOW_SIZE, self._initial)
            self._windows = {stream: window + initial - self._initial for stream, window in self._windows.items()}
            self._initial, self._agreed = initial, True
            self.write(h2.SettingsFrame(0, flags=["ACK"]).serialize())


def each_of(count, port, act, seconds=60.0, rest_seconds=0.0, **options):
    """Act on many connections, one after another for so long, and keep all until a rest at the end is over."""
    with ExitStack() as connections:
        for _ in zip(range(count), until(seconds), strict=False):
            with suppress(OSError):
                act(connections.enter_context(Peer(port, **options)))
        time.sleep(rest_seconds)


def flood(port, data, seconds=0.5):
    """Send frames again and again over new connections; each is used for as long as it lasts, and reads nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError), Peer(port) as peer:
            while time.monotonic() < end:
                peer.write(data)


def stay(connection, seconds):
    """Read for so long, or until the server closes the connection; return the first bytes."""
    received = b""
    connection.settimeout(seconds)
    end = time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < end and (data := connection.recv(65536)):
            received = received[:65536] + data
    return received


def http_request(start, headers=(), body=b""):
    """Return a request; ``start`` is its method and path."""
    return "\r\n".join([f"{start} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode() + body
