"""Several servers, and nginx before them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import grpc
import psutil

from edge.client import Client, Credentials, Retries
from edge.errors import ServerError
from edge.pb import telemetry_pb2, telemetry_pb2_grpc
from tests.support.models import ORACLE
from tests.support.traffic import INPUTS

_DIRECTORY = Path(__file__).parents[2] / "deploy" / "boards"
CONFIG, FOLLOWER = _DIRECTORY / "nginx.conf", _DIRECTORY / "follow_health.py"
SECONDS = 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Board:
    """A server that can be killed and restarted at the same address."""

    def __init__(self, repository: Path, arguments: Sequence[object]) -> None:
        port = free_port()
        self.url = f"127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "edge", "serve", str(repository), f"--grpc-port={port}", "--no-metrics"]
        self._command += ["--target=onnxruntime", "--log-level=error", "--json", *map(str, arguments)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = False) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if wait:
            self.wait()

    def wait(self) -> None:
        assert self._process
        assert self._process.stdout
        assert self._process.stdout.readline(), "it did not start"

    def runs(self) -> bool:
        return self._process is not None

    def signal(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)

    def end(self, number: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(number)
            self._process.wait(SECONDS)
            assert self._process.stdout
            self._process.stdout.close()
            self._process = None

    def answered(self) -> int:
        # A shared connection may be waiting to reconnect.
        with grpc.insecure_channel(self.url, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = telemetry_pb2_grpc.TelemetryStub(channel)
            reading = stub.Get(telemetry_pb2.GetRequest(), timeout=SECONDS, wait_for_ready=True)
        return sum(model.success_count for model in reading.models)


@contextmanager
def boards(repository: Path, count: int, *arguments: object) -> Iterator[list[Board]]:
    with ExitStack() as stack:
        made = [Board(repository, arguments) for _ in range(count)]
        for board in made:
            stack.callback(board.end, signal.SIGKILL)
            board.start()
        for board in made:
            board.wait()
        yield made


@contextmanager
def balancer(
    urls: Sequence[str],
    directory: Path,
    values: Mapping[str, str] = MappingProxyType({}),
    credentials: Credentials | None = None,
) -> Iterator[str]:
    """Run nginx with the published configuration for three servers; yield its address once it answers a request.

    ``values`` replaces directives of the configuration.
    """
    port = free_port()
    written = CONFIG.read_text()
    changes = {f"192.0.2.{number}:8001": url for number, url in enumerate(urls, 1)}
    changes |= {"listen 8001 http2;": f"listen 127.0.0.1:{port} http2;", **values}
    for old, new in changes.items():
        assert written.count(old) >= 1, old
        written = written.replace(old, new)
    config = directory / "nginx.conf"
    config.write_text(written)
    globally = f"daemon off; master_process on; pid {directory}/nginx.pid;"
    command = ["nginx", "-p", str(directory), "-c", str(config), "-e", "stderr", "-g", globally]
    with (directory / "nginx.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    url = f"127.0.0.1:{port}"
    try:
        _wait_for_answers(url, credentials, directory / "nginx.log")
        yield url
    finally:
        process.terminate()
        process.wait(SECONDS)


def reload(directory: Path, old: str, new: str) -> None:
    """Change the configuration of the balancer, and wait until new requests follow it."""
    config = directory / "nginx.conf"
    written = config.read_text()
    assert old in written, old
    config.write_text(written.replace(old, new))
    master = int((directory / "nginx.pid").read_text())
    workers = psutil.Process(master).children()
    os.kill(master, signal.SIGHUP)
    # The old workers end once their connections do.
    psutil.wait_procs(workers, timeout=SECONDS)


@contextmanager
def followed(directory: Path) -> Iterator[None]:
    command = [sys.executable, str(FOLLOWER), str(directory / "nginx.conf"), f"--pid-file={directory / 'nginx.pid'}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr
        assert process.stderr.readline()
        yield
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def _wait_for_answers(url: str, credentials: Credentials | None, log: Path) -> None:
    retries = Retries(attempts=1000, longest_seconds=0.1, budget=1000)
    with Client(url, 10.0, retries=retries, credentials=credentials) as client:
        try:
            client.infer(ORACLE, INPUTS)
        except ServerError as error:
            raise AssertionError(log.read_text()) from error
