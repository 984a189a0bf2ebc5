"""All kinds of clients at once for minutes: every request ends as it should, and neither memory nor files grow.

FEWHEADS_SOAK_MINUTES sets the duration, 10 by default.
"""

import os
import random
import socket
import threading
import time
import urllib.request
from collections import Counter

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.client.connection import open_stub
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from tests.support.http2_client import OPENING
from tests.support.http_requests import ask, tensor
from tests.support.metrics import gauges, is_at_rest, wait_until
from tests.support.models import write_oracle_bundle
from tests.support.sample_requests import expression
from tests.support.server_models import busy, write_busy_bundle
from tests.support.server_processes import served

Code = grpc.StatusCode
OVERLOAD = {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
#: Each kind of client, a method of :class:`Traffic`, and the errors that it may get. All others are faults.
REFUSALS = {
    "infer": OVERLOAD,
    "stream": OVERLOAD,
    "rest": {"429", "504"},
    "cancel": {"CANCELLED", *OVERLOAD},
    "deadline": OVERLOAD,
    "wrong": {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "INTERNAL", *OVERLOAD},
    "reload": set(),
    "watch": set(),
    "hang_up": set(),
}
NAMES = ("steady", "changing", "coming")
SECONDS = 30


class Traffic:
    """The clients of a server with REST and with :data:`NAMES` and ``busy`` to load at will.

    ``ended`` counts requests by kind and status; ``faults`` are unexpected results.
    """

    def __init__(self, ready, repository):
        self.ended = Counter()
        self.faults = []
        self._ready = ready
        self._repository = repository
        self._stop = threading.Event()
        self._version = 1
        self._threads = [threading.Thread(target=self._go_on, args=(kind,), name=kind) for kind in REFUSALS]

    def start(self):
        for thread in self._threads:
            thread.start()

    def stop(self):
        """Wait for the current request of each kind."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)
            if thread.is_alive():
                self.faults.append(f"{thread.name}: no response")

    def _go_on(self, kind):
        chance = random.Random(kind)
        while not self._stop.is_set():
            # A new connection now and then, like clients that come and go.
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(f"127.0.0.1:{self._ready.grpc_port}", options) as channel:
                for _ in range(50):
                    if self._stop.wait(chance.uniform(0, 0.05)):
                        return
                    self._once(kind, chance, channel)

    def _once(self, kind, chance, channel):
        try:
            status = getattr(self, f"_{kind}")(chance, channel) or "OK"
        except grpc.RpcError as error:
            status = error.code().name
            if status not in REFUSALS[kind]:
                self.faults.append(f"{kind}: {status} {error.details()}")
        except Exception as error:
            status = type(error).__name__
            self.faults.append(f"{kind}: {error!r}")
        self.ended[kind, status] += 1

    def _infer(self, chance, channel):
        number = chance.randrange(100)
        _check(number, open_stub(channel).ModelInfer(_sum_request(chance, number), timeout=SECONDS))

    def _stream(self, chance, channel):
        numbers = [chance.randrange(100) for _ in range(chance.randrange(20))]
        answers = open_stub(channel).ModelStreamInfer((_sum_request(chance, n) for n in numbers), timeout=SECONDS)
        left = chance.randrange(40)  # some clients leave before the end
        for number, answer in zip(numbers[:left], answers, strict=False):
            if not answer.error_message:
                _check(number, answer.infer_response)
            elif "waiting" not in answer.error_message and "deadline" not in answer.error_message:
                raise AssertionError(answer.error_message)
        answers.cancel()

    def _rest(self, chance, channel):
        number, name = chance.randrange(100), chance.choice(NAMES[:2])
        body = {"inputs": [tensor("expression", "BYTES", [1, 1], [f"{number} + 1"])]}
        response = ask(f"127.0.0.1:{self._ready.http_port}", f"/v2/models/{name}/infer", body, timeout=SECONDS)
        if response.status != 200:
            assert str(response.status) in REFUSALS["rest"], response
            return str(response.status)
        assert response.json["outputs"][0]["data"] == [number + 1], response
        return "OK"

    def _cancel(self, chance, channel):
        calls = [open_stub(channel).ModelInfer.future(busy(chance.randrange(1, 60)), timeout=SECONDS) for _ in range(3)]
        time.sleep(chance.uniform(0, 0.03))
        for call in calls[1:]:
            call.cancel()
        calls[0].result()

    def _deadline(self, chance, channel):
        request = busy(chance.randrange(1, 60), chance.choice([0, 1, 1000, 20_000]))
        open_stub(channel).ModelInfer(request, timeout=chance.choice([0.001, 0.01, 0.05, SECONDS]))

    def _wrong(self, chance, channel):
        data = bytearray(_sum_request(chance, 1).SerializeToString())
        for _ in range(chance.randrange(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(bytes(data), timeout=SECONDS)

    def _reload(self, chance, channel):
        self._version += 1
        write_oracle_bundle(self._repository / "changing", "changing", self._version, replace=True)
        stub = open_stub(channel)
        for name in ("changing", "coming"):
            stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=SECONDS)
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="coming"), timeout=SECONDS)
        self._stop.wait(0.5)

    def _watch(self, chance, channel):
        urllib.request.urlopen(f"http://127.0.0.1:{self._ready.metrics_port}/metrics", timeout=SECONDS).close()
        telemetry = open_stub(channel)
        assert not telemetry.Get(telemetry_pb2.GetRequest(), timeout=SECONDS).problems
        watching = telemetry.Watch(telemetry_pb2.WatchRequest(interval_ms=100), timeout=SECONDS)
        next(watching)
        watching.cancel()
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="steady"))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        open_stub(channel).RepositoryIndex(pb.RepositoryIndexRequest(), timeout=SECONDS)
        self._stop.wait(0.2)

    def _hang_up(self, chance, channel):
        port = chance.choice([self._ready.grpc_port, self._ready.http_port, self._ready.metrics_port])
        data = chance.choice([b"", OPENING, OPENING[:10], b"GET /v2 HTTP/1.1\r\n", chance.randbytes(50)])
        with socket.create_connection(("127.0.0.1", port or 0), timeout=SECONDS) as connection:
            connection.sendall(data)


def _sum_request(chance, number):
    request = expression(b"%d + 1" % number)
    request.model_name = chance.choice(NAMES[:2])
    return request


def _check(number, response):
    value = np.frombuffer(response.raw_output_contents[0], np.float32)[0]
    assert value == number + 1, f"{number} + 1 gave {value}"


#: These tests concern the protocol, which every transport carries.
ON_EVERY_TRANSPORT = True

MINUTES = float(os.environ.get("FEWHEADS_SOAK_MINUTES", "10"))
SAMPLE_SECONDS = 2.0
#: Share of the duration in which growth is normal.
WARM_UP = 0.4
ALLOWED_SLOPE_BYTES_PER_MINUTE = 2**20
#: The pools of the allocator grow with the first few hundred reloads; shorter runs show no trend.
ENOUGH_MINUTES = 4
ALLOWED_FILES = 10
MODELS = (*NAMES[:2], "busy")


@pytest.fixture
def repository(tmp_path):
    for name in NAMES:
        write_oracle_bundle(tmp_path / "repository" / name, name, 1)
    write_busy_bundle(tmp_path / "repository")
    return tmp_path / "repository"


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_soak(repository, transport):
    arguments = ["--model-control=explicit", "--http-port=0", "--log-level=warning", f"--transport={transport}"]
    with served(repository, *arguments, *(f"--load-model={name}" for name in MODELS)) as server:
        process = psutil.Process(server.ready.process_id)
        files, start = process.num_fds(), process.memory_info().rss
        traffic = Traffic(server.ready, repository)
        traffic.start()
        sizes = []
        until = time.monotonic() + MINUTES * 60
        while time.monotonic() < until and not traffic.faults:
            time.sleep(SAMPLE_SECONDS)
            sizes.append(process.memory_info().rss)
        traffic.stop()
        warm = sizes[int(WARM_UP * len(sizes)) :]
        per_minute = np.polyfit(np.arange(len(warm)), warm, 1)[0] * 60 / SAMPLE_SECONDS
        megabytes = " ".join(f"{size / 1e6:.1f}" for size in (start, warm[0], warm[-1]))
        total = traffic.ended.total()
        print(f"\nstart, warm, end: {megabytes} MB; {per_minute / 1e3:.1f} kB a minute; {total} requests")
        print({f"{kind} {how}": count for (kind, how), count in sorted(traffic.ended.items())})
        assert not traffic.faults, traffic.faults[:10]
        assert all(traffic.ended[kind, "OK"] for kind, _ in traffic.ended)
        assert wait_until(lambda: is_at_rest(server.ready))
        assert gauges(server.ready, "problems") == [0]
        for name in MODELS:  # succeeds only if every request has ended
            server.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), timeout=20)
        assert wait_until(lambda: process.num_fds() <= files + ALLOWED_FILES), process.num_fds()
        assert per_minute < ALLOWED_SLOPE_BYTES_PER_MINUTE or MINUTES < ENOUGH_MINUTES
        code, log = server.stop()
    assert (code, log) == (0, "")
