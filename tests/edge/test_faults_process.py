"""Servers that are terminated or killed under load: every request gets a response or an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path

import grpc
import numpy as np
import pytest

from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from tests.support.metrics import wait_until
from tests.support.models import write_oracle_bundle
from tests.support.sample_requests import expression
from tests.support.server_processes import Served, served

#: These tests concern the protocol, which every transport carries.
ON_EVERY_TRANSPORT = True

Stub = inference_pb2_grpc.GRPCInferenceServiceStub
OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
CLIENTS = 4
#: Far above the latency of any request that gets a response.
SECONDS = 10


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_oracle_bundle(tmp_path / "repository" / "oracle", "oracle", 1).path.parent


def sum_request(number: int) -> pb.ModelInferRequest:
    request = expression(b"%d + 1" % (number % 100))
    request.model_name = "oracle"
    return request


class Clients:
    """Clients that send requests without a pause, each on its own connection, the first of them on a stream.

    Attributes:
        codes: the number of requests by status.
        slowest: the longest latency, in seconds.
    """

    def __init__(self, server: Served) -> None:
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.slowest = 0.0
        self._wrong: list[object] = []
        self._url = f"127.0.0.1:{server.ready.grpc_port}"
        self._stop = threading.Event()
        works = [self._stream, *[self._infer] * (CLIENTS - 1)]
        self._threads = [threading.Thread(target=self._until_refused, args=(work,)) for work in works]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send requests while the block runs; each client stops at its first error."""
        for thread in self._threads:
            thread.start()
        try:
            assert wait_until(lambda: self.codes[OK] > 20 * CLIENTS)
            yield
        finally:
            for thread in self._threads:
                thread.join(SECONDS)
                self._stop.set()
                assert not thread.is_alive(), "a request got no response"
        assert not self._wrong

    def _until_refused(self, work: Callable[[Stub], None]) -> None:
        with grpc.insecure_channel(self._url) as channel:
            try:
                work(Stub(channel))
            except grpc.RpcError as error:
                self.codes[error.code()] += 1

    def _infer(self, stub: Stub) -> None:
        for number in count():
            begun = time.monotonic()
            try:
                self._check(number, stub.ModelInfer(sum_request(number), timeout=SECONDS))
            finally:
                self.slowest = max(self.slowest, time.monotonic() - begun)

    def _stream(self, stub: Stub) -> None:
        requests = map(sum_request, takewhile(lambda _: not self._stop.is_set(), count()))
        for number, response in enumerate(stub.ModelStreamInfer(requests)):
            assert not response.error_message, response.error_message
            self._check(number, response.infer_response)

    def _check(self, number: int, response: pb.ModelInferResponse) -> None:
        value = np.frombuffer(response.raw_output_contents[0], np.float32)[0]
        if value != number % 100 + 1:
            self._wrong.append((number, value))
        self.codes[OK] += 1


def test_sigterm_under_load(repository: Path, transport: str) -> None:
    with served(repository, f"--transport={transport}", "--drain-seconds=20") as server:
        clients = Clients(server)
        with clients.sending():
            begun = time.monotonic()
            os.kill(server.ready.process_id, signal.SIGTERM)
        code, log = server.end()
        assert time.monotonic() - begun < SECONDS  # there was nothing to wait for
    assert code == 0
    # Rarely grpcio cancels a call that arrives at the moment when it stops.
    refused = {UNAVAILABLE, grpc.StatusCode.CANCELLED} if transport == "grpcio" else {UNAVAILABLE}
    assert set(clients.codes) <= {OK, *refused}
    assert sum(clients.codes[code] for code in refused) == CLIENTS
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.slow
def test_sigkill_under_load(repository: Path, transport: str) -> None:
    """Clients get an error at once; the next server on the same port needs no cleanup."""
    before = sorted(path.name for path in repository.rglob("*"))
    with served(repository, f"--transport={transport}") as server:
        port = server.ready.grpc_port
        clients = Clients(server)
        with clients.sending():
            os.kill(server.ready.process_id, signal.SIGKILL)
        assert server.end()[0] == -signal.SIGKILL
    assert clients.codes[UNAVAILABLE] == CLIENTS
    assert set(clients.codes) == {OK, UNAVAILABLE}
    assert clients.slowest < 5
    assert sorted(path.name for path in repository.rglob("*")) == before
    again = running_server([repository / "oracle"], arguments=[f"--grpc-port={port}", f"--transport={transport}"])
    with again as ready, grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
        assert Stub(channel).ModelInfer(sum_request(1), timeout=SECONDS)
