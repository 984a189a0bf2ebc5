"""Clients and commands that reach a server over mutual TLS with a token, and those that do not get in."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from edge.client import ONCE, Client, Credentials, InferRequest, InferResult, text
from edge.client.aio import AsyncClient
from edge.errors import ServerError, UsageError
from edge.security.credentials import channel_credentials
from edge.server import Ready
from tests.support.commands import answer, fewheads, refusal
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.secured_servers import HOST, Authority, logging_server, tokens_file

QUESTION = {"expression": text(["3 - -4 + 2"])}


class Door(NamedTuple):
    """A server that lets in whoever has a certificate and a token, and both of them."""

    url: str
    options: tuple[str, ...]
    credentials: Credentials
    authority: Authority
    metrics_port: int
    infer_token_file: Path


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("door")
    authority = Authority(directory / "authority")
    (certificate, key), own = authority.issue(), authority.issue("client")
    tokens = tokens_file(directory / "tokens", all=["infer", "metrics"], infer=["infer"])
    token, token_file, infer_token_file = tokens["all"], directory / "token", directory / "infer"
    for file, secret in ((token_file, token), (infer_token_file, tokens["infer"])):
        file.write_text(secret)
        file.chmod(0o600)
    (directory / "repository").mkdir()
    (directory / "repository" / "oracle").symlink_to(ORACLE_BUNDLE, target_is_directory=True)
    arguments = [f"--tls-certificate={certificate}", f"--tls-key={key}", f"--tls-client-ca={authority.file}"]
    arguments += [f"--tokens={directory / 'tokens'}", f"--cache={directory / 'cache'}"]
    options = (f"--tls-ca={authority.file}", f"--tls-certificate={own[0]}", f"--tls-key={own[1]}")
    with logging_server(directory / "repository", directory / "log", *arguments) as ready:
        credentials = Credentials(tls=channel_credentials(authority.file, *own), token=token)
        options += (f"--token-file={token_file}",)
        yield Door(f"{HOST}:{ready.grpc_port}", options, credentials, authority, ready.metrics_port, infer_token_file)


async def test_clients_get_in(door: Door) -> None:
    with Client(door.url, credentials=door.credentials) as client:
        assert client.infer(ORACLE, QUESTION).outputs["value"] == 9
        (result,) = client.infer_stream([InferRequest(model=ORACLE, inputs=QUESTION)])
        assert isinstance(result, InferResult)
        assert next(client.watch()).models[0].name == ORACLE
    async with AsyncClient(door.url, credentials=door.credentials) as client:
        assert (await client.infer(ORACLE, QUESTION)).outputs["value"] == 9


def test_a_server_that_is_down_is_passed_over_with_credentials_too(door: Door) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        down = f"{HOST}:{taken.getsockname()[1]}"
        with Client([down, door.url], credentials=door.credentials) as client:
            assert [client.infer(ORACLE, QUESTION).call.attempts for _ in range(4)] == [2, 1, 1, 1]


def test_strangers_stay_outside(door: Door) -> None:
    tls = door.credentials.tls
    for credentials, code in (
        (Credentials(tls=tls), "UNAUTHENTICATED"),
        (Credentials(tls=tls, token="wrong"), "UNAUTHENTICATED"),
        (Credentials(token=door.credentials.token), "UNAVAILABLE"),
        (Credentials(tls=channel_credentials(), token=door.credentials.token), "UNAVAILABLE"),
    ):
        with Client(door.url, credentials=credentials) as client, pytest.raises(ServerError) as caught:
            client.infer(ORACLE, QUESTION)
        assert caught.value.code == code
        assert caught.value.attempts == (1 if code == "UNAUTHENTICATED" else 4)
        assert door.credentials.token not in str(caught.value)


def test_commands_get_in(door: Door) -> None:
    shown = json.loads(answer(fewheads("infer", ORACLE, "3 - -4 + 2", "--url", door.url, *door.options, "--json")))
    assert (shown["outputs"], shown["server"]) == ({"value": [[9]]}, door.url)
    assert ORACLE in answer(fewheads("info", "--url", door.url, *door.options))


def test_info_shows_what_the_token_may_see(door: Door) -> None:
    done = fewheads("info", "--url", door.url, *door.options[:3], f"--token-file={door.infer_token_file}")
    assert "READY" in answer(done)
    assert done.stderr == "Left out: latency and memory. A token of the scope metrics shows them.\n"
    done = fewheads("info", "--url", door.url, *door.options[:3], f"--token-file={door.infer_token_file}", "--json")
    shown = json.loads(answer(done))
    assert (shown["models"][0]["name"], shown["memory_bytes"], shown["latency"]) == (ORACLE, None, None)
    assert "scope metrics" in shown["left_out"]
    told = refusal(fewheads("top", "--url", door.url, *door.options[:3], f"--token-file={door.infer_token_file}"), 7)
    assert "PERMISSION_DENIED" in told


@pytest.mark.parametrize("loop", [["--requests", "10"], ["--rate", "50", "--seconds", "0.2", "--warm-up", "0"]])
def test_a_bench_gets_in(door: Door, loop: list[str]) -> None:
    assert json.loads(answer(fewheads("bench", ORACLE_BUNDLE, "--url", door.url, *door.options, *loop, "--json")))


def test_commands_that_do_not(door: Door, tmp_path: Path) -> None:
    without = refusal(fewheads("infer", ORACLE, "1", "--url", door.url, *door.options[:3]), 7)
    assert "UNAUTHENTICATED" in without
    assert "--token-file" in without
    assert "--tls-key" in refusal(fewheads("infer", ORACLE, "1", "--url", door.url, *door.options[:2]), 2)
    missing = refusal(fewheads("infer", ORACLE, "1", f"--token-file={tmp_path / 'none'}"), 2)
    assert "expected a readable file" in missing
    assert "--url: got none, with credentials" in refusal(fewheads("bench", ORACLE_BUNDLE, *door.options), 2)


# Wrong ways to connect, and what the client says about each


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("wrong"))


def refused_by(url: str, credentials: Credentials | None = None) -> str:
    with Client(url, retries=ONCE, credentials=credentials) as client, pytest.raises(ServerError) as caught:
        client.index()
    assert (caught.value.code, caught.value.exit_code) == ("UNAVAILABLE", 6)
    return str(caught.value)


def test_tls_that_only_one_side_uses(door: Door, url: str, authority: Authority) -> None:
    plain_client = refused_by(door.url)
    assert "(Socket closed)" in plain_client
    assert "If it uses TLS, connect with --tls, or with --tls-ca" in plain_client
    assert "That port does not use TLS. Leave out --tls" in refused_by(url, trusting(authority))


def test_a_client_without_the_certificate_that_the_server_asks_for(door: Door) -> None:
    without = Credentials(tls=channel_credentials(door.authority.file), token=door.credentials.token)
    assert "give --tls-certificate and --tls-key" in refused_by(door.url, without)


@pytest.mark.parametrize(
    ("issued", "told"),
    [
        ({"hosts": ["board.example"]}, "The server's certificate is for another name."),
        ({"not_before": -20, "not_after": -10}, "has expired. Renew it."),
        ({"not_before": 10, "not_after": 20}, "is not valid yet. Compare the clocks of both hosts."),
    ],
    ids=["name", "expired", "future"],
)
def test_a_certificate_that_does_not_fit(authority: Authority, issued: dict[str, Any], told: str) -> None:
    now = datetime.now(timezone.utc)
    dates = {name: now + timedelta(days=value) for name, value in issued.items() if name != "hosts"}
    certificate, key = authority.issue("wrong", **{**issued, **dates})
    with tls_server(certificate, key) as url:
        assert told in refused_by(url, trusting(authority))
        assert "Give the PEM file of its authority with --tls-ca." in refused_by(
            url, Credentials(tls=channel_credentials())
        )


@contextmanager
def tls_server(certificate: Path, key: Path) -> Iterator[str]:
    """A gRPC server without any service, which is enough for a handshake."""
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    port = server.add_secure_port(f"{HOST}:0", credentials)
    server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        server.stop(None).wait()


def trusting(authority: Authority) -> Credentials:
    return Credentials(tls=channel_credentials(authority.file))


def test_ports_that_speak_http(server: Ready, door: Door) -> None:
    told = "That is an HTTP port; gRPC is on --grpc-port, 8001 by default."
    assert told in refused_by(f"{HOST}:{server.metrics_port}")
    assert told in refused_by(f"{HOST}:{server.http_port}")
    assert told in refused_by(f"{HOST}:{door.metrics_port}", door.credentials)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:8O01", "Give --url as HOST:PORT, for example 127.0.0.1:8001."),
        ("no-such-board.invalid:8001", "No address is known for that host."),
    ],
)
def test_addresses_that_lead_nowhere(url: str, told: str) -> None:
    assert told in refused_by(url)


def test_an_address_without_a_port() -> None:
    with socket.socket() as probe:
        if probe.connect_ex((HOST, 443)) == 0:
            pytest.skip("this machine listens on gRPC's default port, 443")
    assert "Does --url name the port? 8001 is the default." in refused_by(HOST)


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_an_address_has_no_scheme(client: type[Client] | type[AsyncClient]) -> None:
    with pytest.raises(UsageError, match=r"expected HOST:PORT without a scheme. Give 127.0.0.1:8001.$"):
        client("http://127.0.0.1:8001/")
    line = refusal(fewheads("top", "--once", "--url", "https://127.0.0.1:8001"), 2)
    assert line.endswith("Give 127.0.0.1:8001. TLS is an option of its own: --tls.")
