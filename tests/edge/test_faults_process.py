"""Servers that are terminated or killed under load: every request gets a response or an error."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from edge.client import Client
from edge.launch import running_server
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_processes import served
from tests.support.traffic import INPUTS, traffic

#: These tests concern the protocol, which every transport carries.
ON_EVERY_TRANSPORT = True

CLIENTS = 4


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_oracle_bundle(tmp_path / "repository" / "oracle", "oracle", 1).path.parent


def test_sigterm_under_load(repository: Path, transport: str) -> None:
    with (
        served(repository, f"--transport={transport}", "--drain-seconds=20") as server,
        traffic(f"127.0.0.1:{server.ready.grpc_port}", "oracle", threads=CLIENTS, streams=1) as sent,
    ):
        assert wait_until(lambda: len(sent.answers) > 20 * CLIENTS)
        begun = time.monotonic()
        os.kill(server.ready.process_id, signal.SIGTERM)
        code, log = server.end()
        assert time.monotonic() - begun < 10  # there was nothing to wait for
        assert wait_until(lambda: len(sent.failures) > CLIENTS)
    assert code == 0
    # Rarely grpcio cancels a call that arrives at the moment when it stops.
    refused = {"UNAVAILABLE", "CANCELLED"} if transport == "grpcio" else {"UNAVAILABLE"}
    assert {error.code for _, error in sent.failures} <= refused
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.slow
def test_sigkill_under_load(repository: Path, transport: str) -> None:
    """Clients get an error at once; the next server on the same port needs no cleanup."""
    before = sorted(path.name for path in repository.rglob("*"))
    with served(repository, f"--transport={transport}") as server:
        url = f"127.0.0.1:{server.ready.grpc_port}"
        with traffic(url, "oracle", threads=CLIENTS, streams=1) as sent:
            assert wait_until(lambda: len(sent.answers) > 20 * CLIENTS)
            os.kill(server.ready.process_id, signal.SIGKILL)
            assert wait_until(lambda: len(sent.failures) > CLIENTS, 5)
        assert server.end()[0] == -signal.SIGKILL
    assert {error.code for _, error in sent.failures} == {"UNAVAILABLE"}
    assert sorted(path.name for path in repository.rglob("*")) == before
    port = url.rpartition(":")[2]
    with running_server([repository / "oracle"], arguments=[f"--grpc-port={port}", f"--transport={transport}"]):
        assert Client(url).infer("oracle", INPUTS)
