"""Servers as child processes, with their log and exit code."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import grpc
import msgspec
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.client.connection import open_stub
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.server import Ready
from tests.support.models import ORACLE, oracle_golden
from tests.support.sample_requests import raw_request

SECONDS = 60


class Served:
    """A server that takes requests, with a channel to it."""

    def __init__(self, process):
        self.process = process
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        self.ready = msgspec.json.decode(line, type=Ready)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.ready.grpc_port}")
        self.stub = open_stub(self.channel)

    def stop(self):
        """Ask it to end; return its exit code and its log."""
        os.kill(self.ready.process_id, signal.SIGTERM)
        return self.end()

    def end(self):
        """Wait until it exits; return its exit code and its log."""
        _, log = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, log


@contextmanager
def served(repository, *arguments, program="edge", **variables):
    """Run a server, and kill it at the end if it has not exited.

    ``program`` is the module to run, with its first arguments; ``variables`` are of its environment.
    """
    command = [sys.executable, "-m", *program.split(), "serve", str(repository)]
    command += ["--grpc-port=0", "--metrics-port=0", "--json", "--target=onnxruntime", *map(str, arguments)]
    environment, pipe = {**os.environ, **variables}, subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment)
    try:
        server = Served(process)
        yield server
        server.channel.close()
    finally:
        process.kill()
        process.communicate()


def check_golden(server):
    """Check the oracle's answer to its golden inputs."""
    golden = oracle_golden()
    answer = server.stub.ModelInfer(raw_request(ORACLE, x=golden.inputs["x"]))
    value = np.frombuffer(answer.raw_output_contents[0], np.float32)
    np.testing.assert_allclose(value, golden.outputs["value"].reshape(-1), atol=1e-4)


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(server, name):
    return health_of(server.ready, name)[0]


def health_of(ready, *names):
    """Return the health of each service or model by the announcement of a server."""
    with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return [check(health_pb2.HealthCheckRequest(service=name)).status for name in names]


@contextmanager
def stub_of(ready):
    with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
        yield open_stub(channel)


def problems(server):
    return list(server.stub.Get(telemetry_pb2.GetRequest()).problems)


def is_ready(server):
    return bool(server.stub.ServerReady(pb.ServerReadyRequest()).ready)


def model_states(server):
    return {m.name: (m.state, m.reason) for m in server.stub.RepositoryIndex(pb.RepositoryIndexRequest()).models}
