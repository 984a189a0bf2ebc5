"""Servers on Unix sockets: stock clients, permissions, limits, and the files that are replaced, kept and removed."""

import json
import os
import socket
import stat
import subprocess
import sys

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from edge.client import Client
from edge.connections.socket_file import SocketFile
from edge.errors import ServerError, UsageError
from edge.launch import running_server
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.sample_requests import triton_input
from tests.support.secured_servers import Authority, tokens_file
from tests.support.tools import run, tool

ON_EVERY_TRANSPORT = True  # each makes its own socket


def row():
    return triton_input("x", np.ones((1, 15), np.float32))


@pytest.fixture
def paths(tmp_path):
    # gRPC takes addresses as URLs, in which these characters have a meaning.
    return tmp_path / "grpc %41#.sock", tmp_path / "http.sock"


def test_stock_clients_and_our_own(paths, transport):
    rpc, http = paths
    arguments = [f"--grpc-socket={rpc}", f"--http-socket={http}", f"--transport={transport}", "--rate-limit=0.001:4"]
    umask = os.umask(0)  # whatever the process inherits
    try:
        running = running_server([ORACLE_BUNDLE], arguments=arguments)
        with running as ready:
            os.umask(umask)
            assert (ready.grpc_port, ready.http_port) == (None, None)
            assert (ready.grpc_socket, ready.http_socket) == tuple(map(str, paths))
            assert [stat.S_IMODE(path.lstat().st_mode) for path in paths] == [0o660, 0o660]
            plain = rpc.with_name("plain")
            plain.symlink_to(rpc)
            with triton.InferenceServerClient(f"unix:{plain}") as client:
                assert client.infer(ORACLE, [row()]).as_numpy("value").size
            with Client(f"unix:{plain}") as client:
                assert client.infer(ORACLE, {"x": np.ones((1, 15), np.float32)}).outputs["value"].size
            ask = [sys.executable, "-m", "edge", "infer", ORACLE, "3 - 4", "--url", f"unix:{plain}", "--json"]
            assert json.loads(run(*ask).stdout)["outputs"]
            curl = [tool("curl", "apt install curl"), "--silent", "--unix-socket", str(http)]
            url = f"http://localhost/v2/models/{ORACLE}"
            assert json.loads(run(*curl, url).stdout)["name"] == ORACLE
            body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 15], "data": [1.0] * 15}]})
            assert json.loads(run(*curl, f"{url}/infer", "--data", body).stdout)["outputs"]
            # The clients of both sockets have no addresses, and share one limit.
            assert "requests of this client" in json.loads(run(*curl, f"{url}/infer", "--data", body).stdout)["error"]
            refused = pytest.raises(InferenceServerException, match="requests of this client")
            with triton.InferenceServerClient(f"unix:{plain}") as client, refused:
                client.infer(ORACLE, [row()])
            # A name that a web page might have resolved to this host is no more welcome than on a port.
            rebound = json.loads(run(*curl, f"http://evil.example/v2/models/{ORACLE}").stdout)
            assert "Host: got 'evil.example'" in rebound["error"]
    finally:
        os.umask(umask)
    assert not any(path.exists() for path in paths)


def test_stale_socket_is_replaced_and_a_live_one_refused(paths, transport):
    arguments = [f"--grpc-socket={paths[0]}", f"--http-socket={paths[1]}", f"--transport={transport}"]
    command = [sys.executable, "-m", "edge", "serve", str(paths[0].parent), "--no-metrics", "--json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    process.kill()
    process.communicate()
    assert not any(map(alive, paths))
    assert all(path.exists() for path in paths)  # nobody was left to remove them
    with running_server([], arguments=arguments):
        with pytest.raises(ServerError, match="got the socket of another server") as refused:
            running_server([], arguments=arguments[::2]).__enter__()
        assert f"--grpc-socket {paths[0]}" in str(refused.value)
        assert "Traceback" not in str(refused.value)
        with Client(f"unix:{os.path.relpath(paths[0]).replace('%', '%25').replace('#', '%23')}") as client:
            assert client.ready()


def alive(path):
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def bound(path):
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("file", "a file that is no socket"),
        ("link", "a file that is no socket"),
        ("directory", "a file that is no socket"),
        ("none/here", "no such directory"),
        ("file/here", "no such directory"),
        ("x" * 200, " bytes"),
        ("taken", "the socket of another server"),
    ],
)
def test_paths_where_no_socket_can_be_made(tmp_path, name, given):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "stale")
    bound(tmp_path / "stale").close()
    with bound(tmp_path / "taken"):
        before, mask = sorted(tmp_path.iterdir()), os.umask(0o022)
        try:
            with pytest.raises(UsageError) as refused:
                SocketFile("--http-socket", tmp_path / name).make(bound)
            assert os.umask(0o022) == 0o022
        finally:
            os.umask(mask)
        assert refused.value.subject.startswith("--http-socket /")
        assert str(refused.value.given).endswith(given)
        assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "kept"


def test_server_removes_only_its_own_file(tmp_path):
    path = tmp_path / "socket"
    first, second = SocketFile("--http-socket", path), SocketFile("--http-socket", path)
    first.make(bound).close()
    with second.make(bound):
        first.remove()
        assert alive(path)
        second.remove()
        second.remove()
    assert not path.exists()


def test_tls_and_tokens_on_a_socket(tmp_path, transport):
    authority, path = Authority(tmp_path / "ca"), tmp_path / "socket"
    certificate, key = authority.issue()
    secret = tokens_file(tmp_path / "tokens", user=["infer"])["user"]
    arguments = [f"--grpc-socket={path}", f"--tls-certificate={certificate}", f"--tls-key={key}"]
    arguments += [f"--tokens={tmp_path / 'tokens'}", f"--transport={transport}"]
    with running_server([ORACLE_BUNDLE], arguments=arguments):
        credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
        options = (("grpc.ssl_target_name_override", "localhost"),)
        with grpc.secure_channel(f"unix:{path}", credentials, options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert call(b"", metadata=(("authorization", f"Bearer {secret}"),), timeout=20) == b"\x08\x01"
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_server_on_sockets_alone_opens_no_port(tmp_path):
    command = [sys.executable, "-m", "edge", "serve", str(tmp_path), f"--grpc-socket={tmp_path / 'one'}"]
    command += [f"--http-socket={tmp_path / 'two'}", "--no-metrics", "--host=0.0.0.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    while not lines or not lines[-1].startswith("ready"):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    listening = [one for one in psutil.Process(process.pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    process.terminate()
    process.communicate(timeout=30)
    assert (listening, process.returncode) == ([], 0)
    assert any(line.startswith(f"gRPC on unix:{tmp_path / 'one'}, transport") for line in lines)
    assert f"HTTP on unix:{tmp_path / 'two'}\n" in lines
    assert not any("loopback" in line for line in lines)  # nobody on the network can connect
