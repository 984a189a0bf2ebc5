"""Three boards, behind the published nginx or without: one fails under load and returns, and little or nothing is lost.

Without retries the requests in progress on that board are lost; with the client's retries none is.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import grpc
import numpy as np
import psutil
import pytest

from edge.client import Client, Credentials, Retries, text
from edge.client.connection import channel_credentials, open_stub
from edge.errors import ServerError
from edge.pb import telemetry_pb2
from tests.support.commands import free_port
from tests.support.metrics import wait_until
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.secured_servers import Authority, tokens_file
from tests.support.traffic import INPUTS, traffic

_DIRECTORY = Path(__file__).parents[2] / "deploy" / "boards"
CONFIG, FOLLOWER = _DIRECTORY / "nginx.conf", _DIRECTORY / "follow_health.py"
SECONDS = 60


class Board:
    """A server that can be killed and restarted at the same address."""

    def __init__(self, repository, arguments):
        port = free_port()
        self.url = f"127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "edge", "serve", str(repository), f"--grpc-port={port}", "--no-metrics"]
        self._command += ["--target=onnxruntime", "--log-level=error", "--json", *map(str, arguments)]
        self._process = None

    def start(self, wait=False):
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if wait:
            self.wait()

    def wait(self):
        assert self._process
        assert self._process.stdout
        assert self._process.stdout.readline(), "it did not start"

    def runs(self):
        return self._process is not None

    def signal(self, number):
        assert self._process
        self._process.send_signal(number)

    def end(self, number):
        if self._process:
            self._process.send_signal(number)
            self._process.wait(SECONDS)
            assert self._process.stdout
            self._process.stdout.close()
            self._process = None

    def answered(self):
        # A shared connection may be waiting to reconnect.
        with grpc.insecure_channel(self.url, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = open_stub(channel)
            reading = stub.Get(telemetry_pb2.GetRequest(), timeout=SECONDS, wait_for_ready=True)
        return sum(model.success_count for model in reading.models)


@contextmanager
def boards(repository, count, *arguments):
    with ExitStack() as stack:
        made = [Board(repository, arguments) for _ in range(count)]
        for board in made:
            stack.callback(board.end, signal.SIGKILL)
            board.start()
        for board in made:
            board.wait()
        yield made


@contextmanager
def balancer(urls, directory, values=MappingProxyType({}), credentials=None):
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


def reload(directory, old, new):
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
def followed(directory):
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


def _wait_for_answers(url, credentials, log):
    retries = Retries(attempts=1000, longest_seconds=0.1, budget=1000)
    with Client(url, 10.0, retries=retries, credentials=credentials) as client:
        try:
            client.infer(ORACLE, INPUTS)
        except ServerError as error:
            raise AssertionError(log.read_text()) from error


THREADS = 8
#: Time after which nginx, and a client, have noticed the death of a board.
NOTICED_SECONDS = 0.2

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(ORACLE_BUNDLE, repository / "oracle")
    return repository


@pytest.fixture(scope="module")
def _fleet(repository):
    with boards(repository, 3) as made:
        yield made


@pytest.fixture
def fleet(_fleet):
    for board in _fleet:
        if not board.runs():  # an earlier test ended it
            board.start(wait=True)
    return _fleet


@needs_nginx
def test_without_retries_only_requests_in_progress_are_lost(fleet, tmp_path):
    with balancer([board.url for board in fleet], tmp_path) as url, followed(tmp_path), traffic(url, ORACLE) as sent:
        time.sleep(1.5)
        assert min(board.answered() for board in fleet) > 0
        killed = time.monotonic()
        fleet[0].end(signal.SIGKILL)
        time.sleep(3.0)
        fleet[0].start(wait=True)
        started = time.monotonic()
        assert wait_until(lambda: fleet[0].answered() > 20)
        print(f"traffic again after {time.monotonic() - started:.1f} s")
    assert len(sent.failures) <= THREADS
    assert {error.code for _, error in sent.failures} <= {"UNAVAILABLE"}
    assert all(begun < killed + NOTICED_SECONDS for begun, _ in sent.failures), sent.failures


@pytest.mark.parametrize(
    ("balanced", "number"),
    [
        pytest.param(True, signal.SIGKILL, marks=needs_nginx),
        pytest.param(True, signal.SIGTERM, marks=needs_nginx),
        (False, signal.SIGKILL),
        (False, signal.SIGTERM),
    ],
)
def test_retries_lose_nothing(fleet, tmp_path, balanced, number):
    urls = [board.url for board in fleet]
    with ExitStack() as stack:
        servers = stack.enter_context(balancer(urls, tmp_path)) if balanced else urls
        sent = stack.enter_context(traffic(servers, ORACLE, Retries()))
        for board in fleet:
            time.sleep(0.3)
            board.end(number)
            time.sleep(0.5 if number == signal.SIGKILL else 0)
            board.start(wait=True)
            assert wait_until(lambda board=board: board.answered() > 20)
    assert not sent.failures, sent.failures


@needs_nginx
def test_rolling_update_loses_nothing_without_retries(fleet, tmp_path):
    """Each board in turn is taken out of the configuration, ends by SIGTERM, and comes back."""
    with balancer([board.url for board in fleet], tmp_path) as url, traffic(url, ORACLE) as sent:
        for board in fleet:
            time.sleep(0.3)
            reload(tmp_path, f"server {board.url}", f"#server {board.url}")
            before = board.answered()
            time.sleep(0.2)
            assert board.answered() == before
            board.end(signal.SIGTERM)
            board.start(wait=True)
            reload(tmp_path, f"#server {board.url}", f"server {board.url}")
            assert wait_until(lambda board=board: board.answered() > 20)
    assert not sent.failures, sent.failures


@needs_nginx
def test_hanging_board_costs_the_read_timeout(fleet, tmp_path):
    """Requests in progress wait for the read timeout and are then sent elsewhere."""
    values = {"grpc_read_timeout 5s;": "grpc_read_timeout 1s;"}
    with balancer([board.url for board in fleet], tmp_path, values) as url, traffic(url, ORACLE, Retries()) as sent:
        time.sleep(1.0)
        stopped = time.monotonic()
        fleet[0].signal(signal.SIGSTOP)
        time.sleep(6.0)
        others = len(sent.answers)
        fleet[0].signal(signal.SIGCONT)
        before = fleet[0].answered()
        assert wait_until(lambda: fleet[0].answered() > before + 20, 20)
    assert not sent.failures, sent.failures
    assert sum(begun > stopped + 2.0 for begun, _ in sent.answers[:others]) > 100


@needs_nginx
def test_nginx_refuses_control_and_passes_large_messages(repository, tmp_path):
    arguments = ("--model-control=explicit", "--load-model=*")
    with (
        boards(repository, 1, *arguments) as (board,),
        balancer([board.url] * 3, tmp_path) as url,
        Client(url) as client,
    ):
        for change in (client.load, client.unload):
            with pytest.raises(ServerError, match="PERMISSION_DENIED"):
                change(ORACLE)
        # Beyond nginx's default of a megabyte; the errors are the board's.
        with pytest.raises(ServerError, match="INVALID_ARGUMENT"):
            client.infer(ORACLE, {"expression": text(["1" * 3_000_000])})
        with pytest.raises(ServerError, match="RESOURCE_EXHAUSTED"):
            client.infer(ORACLE, {"x": np.zeros((1, 20_000_000), np.float32)})
        assert client.infer(ORACLE, INPUTS).outputs["value"][0, 0] == 2


@needs_nginx
def test_nginx_passes_tokens_and_uses_tls_on_both_sides(repository, tmp_path):
    front, back = Authority(tmp_path / "front"), Authority(tmp_path / "back")
    (certificate, key), (served, served_key) = front.issue(), back.issue()
    (token,) = tokens_file(tmp_path / "tokens", camera=("infer",)).values()
    secured = (f"--tokens={tmp_path / 'tokens'}", f"--tls-certificate={served}", f"--tls-key={served_key}")
    values = {
        " http2;": " ssl http2;",
        "#   ssl_certificate /etc/fewheads/server.pem;": f"ssl_certificate {certificate};",
        "#   ssl_certificate_key /etc/fewheads/server.key;": f"ssl_certificate_key {key};",
        "grpc_pass grpc://": "grpc_pass grpcs://",
        "#   grpc_ssl_verify on;": "grpc_ssl_verify on;",
        "#   grpc_ssl_trusted_certificate /etc/fewheads/boards-ca.pem;": f"grpc_ssl_trusted_certificate {back.file};",
        "#   grpc_ssl_name boards.example;": "grpc_ssl_name localhost;",
    }
    tls = channel_credentials(front.file)
    known = Credentials(tls=tls, token=token)
    with (
        boards(repository, 1, *secured) as (board,),
        balancer([board.url] * 3, tmp_path, values, known) as url,
        Client(url, credentials=Credentials(tls=tls)) as client,
        pytest.raises(ServerError, match="UNAUTHENTICATED"),
    ):
        client.infer(ORACLE, INPUTS)  # `balancer` has already sent a request with the token
