"""Clients and commands over mutual TLS with a token, and the advice for those that fail to connect."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import grpc
import pytest

from edge.client import ONCE, AsyncClient, Client, Credentials, text
from edge.client.connection import channel_credentials
from edge.client.failures import FailedCall
from edge.errors import ServerError, UsageError
from tests.support.clients import CLIENTS
from tests.support.commands import answer, fewheads, mistake, shown
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.scripted_servers import closed_port
from tests.support.secured_servers import HOST, Authority, secured_server

INPUTS = {"expression": text(["3 - -4 + 2"])}


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    with secured_server(tmp_path_factory.mktemp("secured"), all=["infer", "metrics"], infer=["infer"]) as secured:
        yield secured


def credentials_of(secured):
    return Credentials(tls=channel_credentials(secured.authority.file, *secured.client), token=secured.tokens["all"])


def options_of(secured, token="all"):
    certificate, key = secured.client
    options = [f"--tls-ca={secured.authority.file}", f"--tls-certificate={certificate}", f"--tls-key={key}"]
    return [*options, f"--token-file={secured.log.parent / token}"]


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_credentials_admit_clients_and_serve_retries(secured, make):
    credentials = credentials_of(secured)
    assert repr(credentials) == "Credentials()"
    with closed_port() as down, make([down, secured.url], credentials=credentials) as client:
        assert client.infer(ORACLE, INPUTS).call.attempts == 2
        assert next(client.watch(server=secured.url)).models[0].name == ORACLE


def test_commands_send_credentials(secured):
    url = ("--url", secured.url)
    found = json.loads(shown("infer", ORACLE, "3 - -4 + 2", *url, *options_of(secured), "--json"))
    assert (found["outputs"], found["server"]) == ({"value": [[9]]}, secured.url)
    for loop in (["--requests", "10"], ["--rate", "50", "--seconds", "0.2", "--warm-up", "0"]):
        assert json.loads(shown("bench", ORACLE_BUNDLE, *url, *options_of(secured), *loop, "--json"))
    restricted = (*url, *options_of(secured, "infer"))
    done = fewheads("info", *restricted)
    assert "READY" in answer(done)
    assert done.stderr == "Left out: latency and memory. A token of the scope metrics shows them.\n"
    found = json.loads(shown("info", *restricted, "--json"))
    assert (found["models"][0]["name"], found["memory_bytes"], found["latency"]) == (ORACLE, None, None)
    assert "scope metrics" in found["left_out"]
    assert "PERMISSION_DENIED" in mistake("top", *restricted, code=7)


def test_commands_explain_missing_credentials(secured, tmp_path):
    infer = ("infer", ORACLE, "1", "--url", secured.url)
    without = mistake(*infer, *options_of(secured)[:3], code=7)
    assert "UNAUTHENTICATED" in without
    assert without.endswith("Give a token that the server knows with --token-file.")
    assert "--tls-key" in mistake(*infer, *options_of(secured)[:2])
    assert "expected a readable file" in mistake(*infer, f"--token-file={tmp_path / 'none'}")
    assert "--url: expected a server to which TLS" in mistake("bench", ORACLE_BUNDLE, *options_of(secured))


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("wrong"))


def failure(url, credentials=None):
    with Client(url, retries=ONCE, credentials=credentials) as client, pytest.raises(ServerError) as caught:
        client.index()
    assert (caught.value.code, caught.value.exit_code) == ("UNAVAILABLE", 6)
    return str(caught.value)


def trusting(authority):
    return Credentials(tls=channel_credentials(authority.file))


def test_tls_on_one_side_alone(secured, url, authority):
    plain_client = failure(secured.url)
    assert "(Socket closed)" in plain_client
    assert "If it uses TLS, connect with --tls, or with --tls-ca" in plain_client
    assert "That port does not use TLS. Leave out --tls" in failure(url, trusting(authority))
    without = Credentials(tls=channel_credentials(secured.authority.file), token=secured.tokens["all"])
    assert "give --tls-certificate and --tls-key" in failure(secured.url, without)


def test_invalid_certificate_of_a_server(authority):
    now, day = datetime.now(timezone.utc), timedelta(1)
    for issued, message in (
        ({"hosts": ["board.example"]}, "The server's certificate is for another name."),
        ({"not_before": now - 20 * day, "not_after": now - 10 * day}, "has expired. Renew it."),
        ({"not_before": now + 10 * day, "not_after": now + 20 * day}, "is not valid yet. Compare the clocks of both"),
    ):
        certificate, key = authority.issue("wrong", **issued)
        server = grpc.server(ThreadPoolExecutor(1))  # without services, which is enough for a handshake
        credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        url = f"{HOST}:{server.add_secure_port(f'{HOST}:0', credentials)}"
        server.start()
        assert message in failure(url, trusting(authority))
        unknown = failure(url, Credentials(tls=channel_credentials()))
        assert "Give the PEM file of its authority with --tls-ca." in unknown
        server.stop(None).wait()


def test_addresses_of_no_grpc_server(server, secured):
    http_ports = ((server.metrics_port, None), (server.http_port, None))
    for port, credentials in (*http_ports, (secured.ready.metrics_port, credentials_of(secured))):
        assert "an HTTP port; gRPC is on --grpc-port, 8001 by default." in failure(f"{HOST}:{port}", credentials)
    assert "Give --url as HOST:PORT, for example 127.0.0.1:8001." in failure("127.0.0.1:8O01")
    assert "No address is known for that host." in failure("no-such-board.invalid:8001")
    with socket.socket() as probe:
        if probe.connect_ex((HOST, 443)):  # otherwise this machine listens on gRPC's default port
            assert "Does --url name the port? 8001 is the default." in failure(HOST)
    for client in (Client, AsyncClient):
        with pytest.raises(UsageError, match=r"expected HOST:PORT without a scheme. Give 127.0.0.1:8001.$"):
            client("http://127.0.0.1:8001/")
    line = mistake("top", "--once", "--url", "https://127.0.0.1:8001")
    assert line.endswith("Give 127.0.0.1:8001. TLS is an option of its own: --tls.")


def test_error_of_a_failed_call():
    for code, details, tls, message in (
        ("UNAVAILABLE", "Connection reset by peer", True, "got UNAVAILABLE (Connection reset by peer), expected"),
        ("UNAVAILABLE", "Connection reset by peer", True, "The server ended the connection during or after the TLS"),
        ("UNAVAILABLE", "Connection reset by peer", False, "Is it running? `fewheads serve REPOSITORY` starts one"),
        ("UNAVAILABLE", "ipv6:[::1]:1: Connection refused", False, "No server listens on ::1, the last address"),
        ("UNAVAILABLE", "Received http2 header with status: 502", False, "A web server or proxy answered"),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", False, "A web server or proxy answered"),
        ("UNAVAILABLE", "m: got 1, expected 2. Fix it", False, "got UNAVAILABLE, expected an answer. The server says"),
        ("INTERNAL", "x", False, "got INTERNAL (x), expected an answer. See the server's log."),
        ("INTERNAL", "x" * 4001, False, f"({'x' * 4000}), expected an answer."),
        ("NOT_FOUND", "no \x1b[1m\nmodel", False, "The server says: no \\x1b[1m\\nmodel."),
        ("NOT_FOUND", "model!", False, "The server says: model!"),
        ("NOT_FOUND", " ", False, "The server says nothing more. See the server's log."),
        ("NOT_FOUND", "x" * 4000, False, f"The server says: {'x' * 4000}."),
        ("NOT_FOUND", "x" * 4001, False, f"The server says: {'x' * 4000}… (4001 characters)."),
        ("PERMISSION_DENIED", "no.", False, "The server says: no. Give a token that has this scope with --token-file."),
        ("CANCELLED", "late", False, "got CANCELLED (late), expected an answer. Send it again."),
    ):
        assert message in str(FailedCall(code, details).error("model 'm'", "board:1", tls=tls))
