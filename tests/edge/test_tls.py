"""TLS and mutual TLS of a server: certificates that it accepts, follows and reports, and secrets that it never logs."""

import base64
import socket
import ssl
import urllib.request
from contextlib import suppress
from datetime import datetime, timedelta, timezone

import grpc
import psutil
import pytest
import tritonclient.grpc as triton

from edge.client.connection import open_stub
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.settings import TRANSPORTS
from tests.support import secured_servers
from tests.support.commands import fewheads, refusal
from tests.support.metrics import values
from tests.support.sample_requests import column, expression, good, triton_input
from tests.support.secured_servers import HOST, Authority, bearer, secure_channel, secured_server

DAY = timedelta(days=1)


@pytest.fixture(scope="module", params=TRANSPORTS)
def secured(request, tmp_path_factory):
    arguments = ("--log-level=debug", f"--transport={request.param}")
    with secured_server(tmp_path_factory.mktemp("secured"), *arguments, all=["infer", "control", "metrics"]) as secured:
        yield secured


def live(secured, channel):
    stub = open_stub(channel)
    return bool(stub.ServerLive(pb.ServerLiveRequest(), metadata=bearer(secured.tokens["all"]), timeout=10).live)


def problems(secured, channel):
    stub = open_stub(channel)
    return list(stub.Get(telemetry_pb2.GetRequest(), metadata=bearer(secured.tokens["all"]), timeout=10).problems)


def tls_context(secured, client):
    context = ssl.create_default_context(cafile=str(secured.authority.file))
    if client:
        context.load_cert_chain(*client)
    return context


def metrics_page(secured, client):
    address = f"https://{HOST}:{secured.ready.metrics_port}/metrics"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {secured.tokens['all']}"})
    with urllib.request.urlopen(request, timeout=10, context=tls_context(secured, client)) as got:
        return str(got.read().decode())


def test_client_with_a_certificate_is_admitted(secured):
    with secured.channel() as channel:
        assert live(secured, channel)
    chain, key = map(str, secured.client)
    with triton.InferenceServerClient(secured.url, False, True, str(secured.authority.file), key, chain) as client:
        tensor = triton_input("expression", column("1 + 2"))
        result = client.infer("calculator-oracle", [tensor], headers=dict(bearer(secured.tokens["all"])))
        assert result.as_numpy("value")[0, 0] == 3
    assert "fewheads_build_info" in metrics_page(secured, secured.client)


def test_client_without_a_valid_certificate_is_refused(secured, tmp_path):
    stranger = Authority(tmp_path)
    port = secured.ready.grpc_port
    for channel in (
        grpc.insecure_channel(f"{HOST}:{port}"),
        secure_channel(port, secured.authority),  # no certificate
        secure_channel(port, secured.authority, stranger.issue("client")),  # another authority's
        secure_channel(port, stranger, secured.client),  # a client that does not trust the server
    ):
        with channel, pytest.raises(grpc.RpcError) as caught:
            live(secured, channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for client in (None, stranger.issue("other")):
        with pytest.raises(OSError):
            metrics_page(secured, client)
    with secured.channel() as channel, pytest.raises(grpc.RpcError) as caught:  # a certificate is not a token
        open_stub(channel).ServerLive(pb.ServerLiveRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_http1_client_gets_no_answer(secured):
    context = tls_context(secured, secured.client)
    context.set_alpn_protocols(["http/1.1"])
    with (
        suppress(ConnectionError),
        socket.create_connection((HOST, secured.ready.grpc_port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in connection.recv(100)
    with secured.channel() as channel:
        assert live(secured, channel)


def test_replaced_files_hold_for_new_connections(secured):
    """New connections get the new certificate, old ones continue, and an invalid pair changes nothing."""
    chain, key = secured.own
    kept = chain.read_bytes(), key.read_bytes(), secured.authority.file.read_bytes()
    with secured.channel() as old:
        assert problems(secured, old) == []
        try:
            other = Authority(chain.parent / "other")
            new = other.issue()
            chain.write_bytes(new[0].read_bytes())  # with the old key
            with secured.channel() as channel:
                assert live(secured, channel)
                (problem,) = problems(secured, channel)
                assert values(metrics_page(secured, secured.client), "problems") == [1]
            assert problem.startswith("--tls-key: got ")
            key.write_bytes(new[1].read_bytes())
            secured.authority.file.write_bytes(kept[2] + other.file.read_bytes())
            with secure_channel(secured.ready.grpc_port, other, other.issue("client")) as channel:
                assert live(secured, channel)
                assert problems(secured, channel) == []
            assert live(secured, old)
            with secure_channel(secured.ready.grpc_port, other) as channel, pytest.raises(grpc.RpcError):
                live(secured, channel)  # without a client certificate
        finally:
            for path, content in zip((chain, key, secured.authority.file), kept, strict=True):
                path.write_bytes(content)
    with secured.channel() as channel:
        assert live(secured, channel)
        assert problems(secured, channel) == []
    assert "the TLS certificate: --tls-key: got" in secured.log.read_text()
    assert "the TLS certificate: read again" in secured.log.read_text()


def test_doubtful_settings_are_logged_and_wrong_ones_rejected(tmp_path):
    now = datetime.now(timezone.utc)
    chain, key = Authority(tmp_path).issue(not_before=now - 9 * DAY, not_after=now - DAY)
    key.chmod(0o644)
    (tmp_path / "repository").mkdir()
    log = tmp_path / "log"
    arguments = (f"--tls-certificate={chain}", f"--tls-key={key}", "--host=0.0.0.0")
    with secured_servers.logging_server(tmp_path / "repository", log, *arguments):
        pass
    assert f"--tls-certificate {chain}: the TLS certificate has expired" in log.read_text()
    assert "0.0.0.0 is not a loopback address, and anyone who reaches it may send requests" in log.read_text()
    assert f"--tls-key {key}: users other than its owner may read it" in log.read_text()
    chain, key = Authority(tmp_path).issue()
    line = refusal(fewheads("serve", tmp_path, "--tls-certificate", chain, "--tls-key", key, "--tokens", chain), 2)
    assert f"--tokens {chain} line 1: got something else" in line


def response(stub, request, token):
    """Return the answer or the error of a request, which the library raises for tokens that cannot be sent."""
    try:
        return str(stub.ModelInfer(request, metadata=bearer(token), timeout=10))
    except grpc.RpcError as error:
        return str(error.details())
    except ValueError as error:
        return str(error)


def test_no_secret_is_logged_or_sent_back(secured):
    wrong = "fewheads_" + base64.urlsafe_b64encode(b"a wrong token").decode()
    with secured.channel() as channel:
        stub = open_stub(channel)
        requests = [good(), expression(b"3 times 4"), pb.ModelInferRequest(model_name="none")]
        for token in (secured.tokens["all"], wrong, wrong + "\t", f"{secured.tokens['all']} x"):
            responses = [response(stub, request, token) for request in requests]
            assert not [text for text in responses if token in text or secured.tokens["all"] in text]
        for scheme in ("Basic", secured.tokens["all"]):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ServerLive(pb.ServerLiveRequest(), metadata=[("authorization", f"{scheme} {wrong}")], timeout=10)
            assert wrong not in str(caught.value.details())
    assert "nv_inference" in metrics_page(secured, secured.client)
    written = secured.log.read_text()
    assert "DEBUG edge" in written
    keys = [line for path in (secured.own[1], secured.client[1]) for line in path.read_bytes().splitlines()]
    assert len(keys) >= 4
    secrets = [line.decode() for line in keys if line[:1] not in b"#-"]
    for secret in (secured.tokens["all"], wrong, wrong[9:], *secrets):
        assert secret not in written


def test_server_listens_on_loopback_alone(secured):
    connections = psutil.Process(secured.ready.process_id).net_connections()
    listening = {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}
    assert {address.port for address in listening} == {secured.ready.grpc_port, secured.ready.metrics_port}
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
