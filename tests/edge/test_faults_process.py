"""Servers that are terminated or killed under load, and full or read-only disks."""

import os
import signal
import subprocess
import sys
import time

import grpc
import pytest

from edge.client import Client
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from tests.support.commands import answer, fewheads, refusal
from tests.support.conditions import can_mount
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_processes import served
from tests.support.traffic import INPUTS, traffic

ON_EVERY_TRANSPORT = True  # it tests the protocol

CLIENTS = 4


@pytest.fixture
def repository(tmp_path):
    return write_oracle_bundle(tmp_path / "repository" / "oracle", "oracle", 1).path.parent


def test_sigterm_under_load(repository, transport):
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
def test_sigkill_under_load(repository, transport):
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


def is_served(server):
    with Client(f"127.0.0.1:{server.ready.grpc_port}") as client:
        return bool(client.infer("oracle", INPUTS).outputs["value"] == 2)


def test_server_that_can_write_nothing_serves(repository):
    """It can write neither a file nor a line of its debug log."""
    program = "tests.support.conditions no-room -"
    with served(repository, "--model-control=explicit", "--load-model=*", "--log-level=debug", program=program) as one:
        assert is_served(one)
        with pytest.raises(grpc.RpcError) as caught:
            one.stub.ModelInfer(pb.ModelInferRequest(model_name="zz"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        one.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"), timeout=20)
        assert is_served(one)
        os.kill(one.ready.process_id, signal.SIGTERM)
        assert one.end() == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not can_mount("/tmp"), reason="needs mounts of a user's own")
def test_read_only_cache_is_used_and_not_written(repository, tmp_path):
    cache = tmp_path / "builds"
    cache.mkdir()
    arguments = ["build", str(repository / "oracle"), "--target=onnxruntime", f"--cache={cache}", "--json"]
    program = f"tests.support.conditions read-only {cache}"
    command = [sys.executable, "-m", *program.split(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "Read-only file system" in refusal(done, 2)
    for source in ("bundle", "cache"):
        with served(repository, f"--cache={cache}", program=program) as server:
            assert is_served(server)
            os.kill(server.ready.process_id, signal.SIGTERM)
            code, log = server.end()
        assert (code, f"was read from the {source}" in log) == (0, True)
        answer(fewheads(*arguments))
