"""Start, readiness, health, reflection, drain and streams of a server; tests/conformance has more of streams."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from edge.client import Client
from edge.client.connection import open_stub
from edge.errors import ServerError
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.serving.streams import MAX_IN_FLIGHT
from tests.support.metrics import gauge, is_at_rest, wait_until
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.sample_requests import SERVICES, Sender, expression, raw_request
from tests.support.server_models import ECHO_MAX, busy
from tests.support.server_processes import NOT_SERVING, SERVING, health_of, stub_of

ON_EVERY_TRANSPORT = True  # it tests the protocol


def test_announcement_and_health(server, transport):
    assert (server.transport, set(server.unavailable), f"{ORACLE}:1" in server.ready) == (transport, {"broken"}, True)
    assert "model.onnx" in server.unavailable["broken"]
    assert health_of(server, "", "broken", ORACLE) == [NOT_SERVING, NOT_SERVING, SERVING]


def test_two_bundles_of_one_name_and_lenient_readiness(tmp_path):
    for name in ("one", "two"):
        shutil.copytree(ORACLE_BUNDLE, tmp_path / name)
    bundles = [tmp_path / "one", tmp_path / "two"]
    with running_server(bundles, arguments=["--no-strict-readiness"]) as ready:
        assert ready.ready == (f"{ORACLE}:1",)
        assert "each name and version once" in ready.unavailable["two"]
        assert health_of(ready, "", *SERVICES[:2], ORACLE) == [SERVING] * 4
        with Client(f"127.0.0.1:{ready.grpc_port}") as client:
            assert client.ready()
        with stub_of(ready) as stub:
            (group,) = stub.ModelConfig(pb.ModelConfigRequest(name=ORACLE)).config.instance_group
            assert group.count == len(os.sched_getaffinity(0))


def test_reflection_lists_and_describes_the_services(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == set(SERVICES)
    for service in SERVICES:
        assert database.FindFileContainingSymbol(service).service


def test_ctrl_c_drains_and_exits_with_0(bundles, transport):
    only = [bundle for bundle in bundles if bundle.name == "busy-1"]
    with running_server(only, arguments=[f"--transport={transport}"]) as ready, stub_of(ready) as stub:
        stub.ModelInfer(busy(1))
        flying = stub.ModelInfer.future(busy(3000))
        time.sleep(0.3)
        assert not flying.done()
        os.kill(ready.process_id, signal.SIGINT)
        assert flying.result().raw_output_contents[0] == np.int64(3000).tobytes()
    # running_server fails unless the exit code is 0.


def test_empty_repository_is_served(tmp_path):
    with running_server([]) as ready:
        assert (ready.ready, ready.http_port) == ((), None)
        with Client(f"127.0.0.1:{ready.grpc_port}") as client:
            assert client.ready()
            with pytest.raises(ServerError, match="none at all"):
                client.infer("zz", {"x": np.zeros((1, 15), np.float32)})


def test_taken_port_is_reported(bundles, transport):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        others = ("--metrics-port", "--http-port") if transport == "nghttp2" else ()
        for option in ("--grpc-port", *others):
            arguments = [f"{option}={port}", f"--transport={transport}"]
            with pytest.raises(ServerError, match=f"{option} {port}"), running_server([], arguments=arguments):
                pass


def test_sigterm_while_loading_exits_with_0(bundles, tmp_path):
    command = [sys.executable, "-m", "edge", "serve", str(bundles[0].parent), "--grpc-port=0", "--metrics-port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stderr.readline()  # the first bundle is being loaded
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "Traceback" not in log


def numbered(number):
    request = expression(f"{number} - 1".encode())
    request.id = f"request {number}"
    return request


def value_of(response):
    assert not response.error_message
    return float(np.frombuffer(response.infer_response.raw_output_contents[0], np.float32)[0])


#: A client that grants the server no more than 64 KiB ahead of what it reads.
FIXED_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024))


def test_client_that_does_not_read_stops_the_stream(server, url):
    data = np.zeros(ECHO_MAX)  # 32 KiB
    sent = []
    bounded = threading.Event()

    def requests():
        # Endless, because the size of the transport's buffers differs from machine to machine.
        while not bounded.is_set():
            sent.append(len(sent))
            yield raw_request("echo-fp64", identity=str(sent[-1]), in_fp64=data)

    channel = grpc.insecure_channel(url, FIXED_WINDOW)
    stream = open_stub(channel).ModelStreamInfer(requests())
    try:
        assert wait_until(lambda: gauge(server, "stream_requests") == MAX_IN_FLIGHT)
        before = -1
        while before != len(sent):  # until the transport makes the client wait
            before = len(sent)
            time.sleep(0.3)
        assert gauge(server, "stream_requests") == MAX_IN_FLIGHT
        bounded.set()
        received = list(stream)
    finally:
        bounded.set()
        stream.cancel()
        channel.close()
    assert [response.infer_response.id for response in received] == [str(number) for number in sent]
    assert all(response.infer_response.raw_output_contents == [data.tobytes()] for response in received)
    assert wait_until(lambda: is_at_rest(server))


def test_shutdown_answers_the_requests_so_far(bundles, transport):
    only = [bundle for bundle in bundles if bundle.name in ("oracle", "busy-1")]
    sender = Sender()
    begun = 0.0
    with running_server(only, arguments=[f"--transport={transport}"]) as ready, stub_of(ready) as stub:
        stream = stub.ModelStreamInfer(iter(sender))
        sender.queue.put(numbered(1))
        assert value_of(next(stream)) == 0
        for request in (busy(1500), numbered(2)):
            sender.queue.put(request)
        assert wait_until(lambda: gauge(ready, "stream_requests") == 2)
        begun = time.monotonic()
        os.kill(ready.process_id, signal.SIGTERM)
        assert next(stream).infer_response.raw_output_contents
        assert value_of(next(stream)) == 1
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "going down" in caught.value.details()
        sender.queue.put(None)
    assert time.monotonic() - begun < 9  # an idle stream would have held the server for its ten seconds of grace
