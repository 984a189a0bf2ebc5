"""Streams with the stock client, their limits, and clients that leave; tests/conformance has order and errors."""

import os
import signal
import threading
import time

import grpc
import numpy as np
import pytest

from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from edge.serving.streams import MAX_IN_FLIGHT
from tests.support.metrics import gauge, is_at_rest, wait_until
from tests.support.sample_requests import Sender, expression
from tests.support.server_models import ECHO_MAX, busy

ON_EVERY_TRANSPORT = True  # it tests the protocol

Stub = inference_pb2_grpc.GRPCInferenceServiceStub


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
    data = np.zeros(ECHO_MAX).tobytes()  # 32 KiB
    sent = []
    bounded = threading.Event()

    def requests():
        # Endless, because the size of the transport's buffers differs from machine to machine.
        while not bounded.is_set():
            request = pb.ModelInferRequest(model_name="echo-fp64", id=str(len(sent)), raw_input_contents=[data])
            request.inputs.add(name="in_fp64", datatype="FP64", shape=[ECHO_MAX])
            sent.append(len(sent))
            yield request

    channel = grpc.insecure_channel(url, FIXED_WINDOW)
    stream = Stub(channel).ModelStreamInfer(requests())
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
    assert all(response.infer_response.raw_output_contents == [data] for response in received)
    assert wait_until(lambda: is_at_rest(server))


def test_shutdown_answers_the_requests_so_far(bundles, transport):
    only = [bundle for bundle in bundles if bundle.name in ("oracle", "busy-1")]
    sender = Sender()
    begun = 0.0
    going = running_server(only, arguments=[f"--transport={transport}"])
    with going as ready, grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
        stream = Stub(channel).ModelStreamInfer(iter(sender))
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
