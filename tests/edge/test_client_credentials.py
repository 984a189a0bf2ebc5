"""Clients and commands that reach a server over mutual TLS with a token, and those that do not get in."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from edge.client import Client, Credentials, InferRequest, InferResult, text
from edge.client.aio import AsyncClient
from edge.errors import ServerError
from edge.security.credentials import channel_credentials
from tests.edge.commands import answer, fewheads, refusal
from tests.edge.conftest import ORACLE
from tests.edge.models import ORACLE_BUNDLE
from tests.edge.secured import HOST, Authority, logging_server, tokens_file

QUESTION = {"expression": text(["3 - -4 + 2"])}


class Door(NamedTuple):
    """A server that lets in whoever has a certificate and a token, and both of them."""

    url: str
    options: tuple[str, ...]
    credentials: Credentials


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("door")
    authority = Authority(directory / "authority")
    (certificate, key), own = authority.issue(), authority.issue("client")
    token = tokens_file(directory / "tokens", all=["infer", "metrics"])["all"]
    token_file = directory / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    (directory / "repository").mkdir()
    (directory / "repository" / "oracle").symlink_to(ORACLE_BUNDLE, target_is_directory=True)
    arguments = [f"--tls-certificate={certificate}", f"--tls-key={key}", f"--tls-client-ca={authority.file}"]
    arguments += [f"--tokens={directory / 'tokens'}", f"--cache={directory / 'cache'}"]
    options = (f"--tls-ca={authority.file}", f"--tls-certificate={own[0]}", f"--tls-key={own[1]}")
    with logging_server(directory / "repository", directory / "log", *arguments) as ready:
        credentials = Credentials(tls=channel_credentials(authority.file, *own), token=token)
        yield Door(f"{HOST}:{ready.grpc_port}", (*options, f"--token-file={token_file}"), credentials)


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
