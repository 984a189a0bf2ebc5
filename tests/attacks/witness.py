"""The process beside an attack: a well-behaved client of each door, and readings of the server's use of the machine.

Its first line on stdin is a :class:`Watched`; it prints a line of JSON for each call and reading until stdin ends. It
kills a server that takes too much memory or disk, so that no attack harms the machine that tests it.
"""

import http.client
import os
import signal
import ssl
import sys
import threading
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import grpc
import msgspec

from edge.client.connection import open_stub
from edge.pb import inference_pb2 as pb

HOST = "127.0.0.1"
#: A call that takes longer has failed.
SECONDS = 30.0
KILL_BYTES, KILL_LOG_BYTES = 2 * 1024**3, 512 * 1024**2
#: The doors, and the seconds between two calls of each. Those of HTTP take a new connection for each.
DOORS = {"live": 0.02, "infer": 0.02, "image": 0.1, "http": 0.05, "metrics": 0.2}
#: Between two readings.
READ_SECONDS = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Watched(msgspec.Struct, frozen=True):
    """A server, tokens of its well-behaved client, and that client's requests as bytes; no ``authority`` is no TLS."""

    process_id: int
    log: str
    grpc_port: int
    http_port: int
    metrics_port: int
    infer_token: str
    metrics_token: str
    infer: bytes
    image: bytes
    authority: str = ""


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call of the well-behaved client; ``error`` is empty for a good answer."""

    door: str
    start: float
    seconds: float
    error: str


class Reading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The server's memory, processor time, open files and size of its log.

    For ``starved_seconds`` its event loop waited for a processor, without the time that its other threads used one.
    """

    at: float
    rss_bytes: int
    cpu_seconds: float
    starved_seconds: float
    files: int
    log_bytes: int


def _calls(watched):
    """Return a function for each door, which calls once and returns the error."""
    address = f"{HOST}:{watched.grpc_port}"
    if watched.authority:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(Path(watched.authority).read_bytes()))
        context = ssl.create_default_context(cafile=watched.authority)
    else:
        channel, context = grpc.insecure_channel(address), None
    stub = open_stub(channel)
    bearer = (("authorization", f"Bearer {watched.infer_token}"),)
    infer, image = (pb.ModelInferRequest.FromString(message) for message in (watched.infer, watched.image))

    def over_grpc(method, message):
        def call():
            try:
                method(message, timeout=SECONDS, metadata=bearer)
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()[:200]}"
            return ""

        return call

    def get(port, path, token):
        kind = partial(http.client.HTTPSConnection, context=context) if context else http.client.HTTPConnection
        try:
            with closing(kind(HOST, port, timeout=SECONDS)) as connection:
                connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
                response = connection.getresponse()
                response.read()
                return "" if response.status == 200 else f"status {response.status}"
        except (OSError, http.client.HTTPException) as error:
            return repr(error)

    return {
        "live": over_grpc(stub.ServerLive, pb.ServerLiveRequest()),
        "infer": over_grpc(stub.ModelInfer, infer),
        "image": over_grpc(stub.ModelInfer, image),
        "http": lambda: get(watched.http_port, "/v2", watched.infer_token),
        "metrics": lambda: get(watched.metrics_port, "/telemetry.json", watched.metrics_token),
    }


def _read(watched):
    process = Path(f"/proc/{watched.process_id}")
    pages = int((process / "statm").read_text().split()[1])
    times = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    cpu = sum(map(int, times)) / _TICKS
    ran_ns, queued_ns, _ = map(int, (process / "schedstat").read_text().split())  # of its first thread
    starved = (ran_ns + queued_ns) / 1e9 - cpu
    files, log = len(os.listdir(process / "fd")), os.stat(watched.log).st_size
    return Reading(time.monotonic(), pages * _PAGE, cpu, starved, files, log)


def main():
    watched = msgspec.json.decode(sys.stdin.buffer.readline(), type=Watched)
    writing = threading.Lock()

    def say(line):
        with writing:
            sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
            sys.stdout.buffer.flush()

    def go_on(door, call):
        while True:
            start = time.monotonic()
            error = call()
            say(Call(door, start, time.monotonic() - start, error))
            time.sleep(DOORS[door])

    def sample():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            while True:
                reading = _read(watched)
                if reading.rss_bytes > KILL_BYTES or reading.log_bytes > KILL_LOG_BYTES:
                    os.kill(watched.process_id, signal.SIGKILL)
                say(reading)
                time.sleep(READ_SECONDS)

    threading.Thread(target=sample, daemon=True).start()
    for door, call in _calls(watched).items():
        threading.Thread(target=go_on, args=(door, call), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # whatever its threads wait for


if __name__ == "__main__":
    main()
