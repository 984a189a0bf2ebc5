"""What the published nginx lets through, and what not: tokens, TLS on both sides, large messages, changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge.client import Client, Credentials, text
from edge.errors import ServerError
from edge.security.credentials import channel_credentials
from tests.support.balanced_servers import QUESTION, balancer, boards
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.secured_servers import Authority, tokens_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "repository" / "oracle")
    return tmp_path / "repository"


@pytest.fixture
def url(repository: Path, tmp_path: Path) -> Iterator[str]:
    with (
        boards(repository, 1, "--model-control=explicit", "--load-model=*", namespaces=False) as (board,),
        balancer([board.url] * 3, tmp_path) as url,
    ):
        yield url


def test_changes_and_large_messages(url: str) -> None:
    with Client(url) as client:
        for change in (client.load, client.unload):
            with pytest.raises(ServerError, match="PERMISSION_DENIED"):
                change(ORACLE)
        # More than the megabyte that nginx takes unless it is told otherwise; the board says what it thinks of it.
        with pytest.raises(ServerError, match="INVALID_ARGUMENT"):
            client.infer(ORACLE, {"expression": text(["1" * 3_000_000])})
        with pytest.raises(ServerError, match="RESOURCE_EXHAUSTED"):
            client.infer(ORACLE, {"x": np.zeros((1, 20_000_000), np.float32)})
        assert client.infer(ORACLE, QUESTION).outputs["value"][0, 0] == 2


def test_tokens_and_tls_on_both_sides(repository: Path, tmp_path: Path) -> None:
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
        boards(repository, 1, *secured, namespaces=False) as (board,),
        balancer([board.url] * 3, tmp_path, values, known) as url,
    ):
        with Client(url, credentials=known) as client:
            assert client.infer(ORACLE, QUESTION).outputs["value"][0, 0] == 2
        with (
            Client(url, credentials=Credentials(tls=tls)) as client,
            pytest.raises(ServerError, match="UNAUTHENTICATED"),
        ):
            client.infer(ORACLE, QUESTION)
