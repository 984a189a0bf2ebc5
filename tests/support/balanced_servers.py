"""Several servers, each in a network namespace of its own where the machine allows it, and nginx before them."""

from __future__ import annotations

import os
import shutil
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

from edge.client import Client, Credentials, Retries, text
from edge.errors import ServerError
from edge.pb import telemetry_pb2, telemetry_pb2_grpc
from tests.support.models import ORACLE

_DIRECTORY = Path(__file__).parents[2] / "deploy" / "boards"
CONFIG, FOLLOWER = _DIRECTORY / "nginx.conf", _DIRECTORY / "follow_health.py"
SECONDS = 60
INPUTS = {"expression": text(["1 + 1"])}
#: Network for measurements, by RFC 2544.
_NETWORK = "198.18"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=SECONDS)


def no_namespaces() -> str:
    """Return why this machine has no network namespaces; empty if it has."""
    if shutil.which("ip") is None:
        return "`ip` of iproute2 is missing"
    name = f"fewheads-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    return ""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Board:
    """A server that can be killed, disconnected, and restarted at the same address."""

    def __init__(self, repository: Path, url: str, namespace: str = "", arguments: Sequence[object] = ()) -> None:
        self.url = url
        self._namespace = namespace
        host, port = url.split(":")
        prefix = ["ip", "netns", "exec", namespace] if namespace else []
        self._command = [*prefix, sys.executable, "-m", "edge", "serve", str(repository), f"--host={host}"]
        self._command += [f"--grpc-port={port}", "--no-metrics", "--target=onnxruntime", "--log-level=error", "--json"]
        self._command += map(str, arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        """Wait until it accepts requests."""
        assert self._process
        assert self._process.stdout
        assert self._process.stdout.readline(), "it did not start"

    def runs(self) -> bool:
        return self._process is not None

    def end(self, number: signal.Signals) -> None:
        """Send a signal, and wait for the end of the process."""
        if self._process:
            self._process.send_signal(number)
            self._process.wait(SECONDS)
            assert self._process.stdout
            self._process.stdout.close()
            self._process = None

    def link(self, state: str) -> None:
        """Disconnect the board silently, ``down``, as if it had no power, or connect it again, ``up``."""
        _ip("-n", self._namespace, "link", "set", f"b{self._namespace}", state)

    def answered(self) -> int:
        """Return the number of requests answered since the start."""
        # A shared connection may be waiting to reconnect.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.url, options) as channel:
            stub = telemetry_pb2_grpc.TelemetryStub(channel)
            reading = stub.Get(telemetry_pb2.GetRequest(), timeout=SECONDS, wait_for_ready=True)
        return sum(model.success_count for model in reading.models)


@contextmanager
def boards(repository: Path, count: int, *arguments: object, namespaces: bool) -> Iterator[list[Board]]:
    """Run servers, in namespaces of their own or on ports of this host."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            url, name = f"127.0.0.1:{free_port()}", ""
            if namespaces:
                url, name = stack.enter_context(_namespace(number))
            board = Board(repository, url, name, arguments)
            stack.callback(board.end, signal.SIGKILL)
            board.start()
            made.append(board)
        for board in made:
            board.wait()
        yield made


@contextmanager
def _namespace(number: int) -> Iterator[tuple[str, str]]:
    """Make a namespace with a link to this one; yield its address with a port, and its name."""
    name = f"fw{os.getpid() % 1_000_000}x{number}"  # names of interfaces have 15 characters at most
    subnet = f"{_NETWORK}.{number}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", f"h{name}", "type", "veth", "peer", "name", f"b{name}", "netns", name)
        _ip("address", "add", f"{subnet}.1/24", "dev", f"h{name}")
        _ip("link", "set", f"h{name}", "up")
        _ip("-n", name, "address", "add", f"{subnet}.2/24", "dev", f"b{name}")
        _ip("-n", name, "link", "set", f"b{name}", "up")
        yield f"{subnet}.2:8001", name
    finally:
        _ip("netns", "del", name)  # its link goes with it


@contextmanager
def balancer(
    urls: Sequence[str],
    directory: Path,
    values: Mapping[str, str] = MappingProxyType({}),
    credentials: Credentials | None = None,
) -> Iterator[str]:
    """Run nginx with the published configuration for three servers; yield its address once it answers a request.

    Args:
        urls: addresses of the servers.
        directory: for its files.
        values: replacements of directives of the configuration.
        credentials: of the request.
    """
    port = free_port()
    written = CONFIG.read_text()
    changes = {f"192.0.2.{number}:8001": url for number, url in enumerate(urls, 1)}
    changes["listen 8001 http2;"] = f"listen 127.0.0.1:{port} http2;"
    changes.update(values)
    for old, new in changes.items():
        assert written.count(old) >= 1, old
        written = written.replace(old, new)
    config = directory / "nginx.conf"
    config.write_text(written)
    log = (directory / "nginx.log").open("wb")
    globally = f"daemon off; master_process on; pid {directory}/nginx.pid;"
    process = subprocess.Popen(
        ["nginx", "-p", str(directory), "-c", str(config), "-e", "stderr", "-g", globally], stderr=log
    )
    url = f"127.0.0.1:{port}"
    try:
        _wait_for_answers(url, credentials, directory / "nginx.log")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
        log.close()


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
    """Run ``follow_health.py`` for the balancer."""
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
