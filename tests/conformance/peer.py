"""A client of one server, and cases: the outcomes of its calls as text that can be compared."""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.pb import inference_pb2 as pb
from edge.pb.pool import POOL
from edge.serving.wire import from_raw
from tests.support.sample_requests import raw_request

SERVICE = "inference.GRPCInferenceService"
_METHODS = {method.name: method for method in POOL.FindServiceByName(SERVICE).methods}
_SECONDS = 30.0


class Peer:
    """A client of the server at ``host:port``."""

    def __init__(self, url):
        self.channel = grpc.insecure_channel(url, options=[("grpc.max_send_message_length", -1)])

    def send(self, method, request=b"", timeout=_SECONDS):
        return self.start(method, request, timeout).result()

    def start(self, method, request=b"", timeout=_SECONDS):
        """Send one message, and return the call."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        parse = GetMessageClass(_METHODS[method].output_type).FromString if method in _METHODS else None
        call = self.channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=parse)
        return call.future(data, timeout=timeout)

    def infer(self, request, timeout=_SECONDS):
        return self.start("ModelInfer", request, timeout)

    def stream(self, requests, timeout=_SECONDS):
        """Open a stream; iterating over it gives the responses."""
        call = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
        )
        messages = (r if isinstance(r, bytes) else r.SerializeToString() for r in requests)
        return call(messages, timeout=timeout)

    def health(self, service):
        stub, request = health_pb2_grpc.HealthStub(self.channel), health_pb2.HealthCheckRequest(service=service)
        name_of = health_pb2.HealthCheckResponse.ServingStatus.Name
        return outcome(lambda: stub.Check(request, timeout=_SECONDS), lambda response: name_of(response.status))

    def executions(self, model, version="1"):
        request = pb.ModelStatisticsRequest(name=model, version=version)
        (statistics,) = self.send("ModelStatistics", request).model_stats
        return int(statistics.execution_count)


class Outcome(str):
    """The outcome of a call, and its error messages."""

    details = ""


class Case(NamedTuple):
    """An action on both servers; without an outcome, DIFFERENCES.md has both servers' outcomes.

    ``action`` leaves the server as it was, and ``text`` is part of this server's error message.
    """

    name: str
    action: Callable
    outcome: str = ""
    text: str = ""


def outcome(call, view=None):
    """Return the status of a call, and a view of its response."""
    try:
        response = call()
    except grpc.RpcError as error:
        failed = Outcome(error.code().name)
        failed.details = error.details() or ""
        return failed
    return Outcome("OK" if view is None else f"OK: {view(response)}")


def call(method, request=b"", view=None, timeout=_SECONDS, **fields):
    """Send one message: ``request``, or one with these fields."""
    message = GetMessageClass(_METHODS[method].input_type)(**fields) if fields else request
    return lambda peer: outcome(lambda: peer.send(method, message, timeout), view)


def infer(request, view=None):
    return call("ModelInfer", request, view)


def invalid(name, message, text):
    return Case(name, infer(message), "INVALID_ARGUMENT", text)


def steps(*actions):
    def run(peer):
        each = [action(peer) for action in actions]
        joined = Outcome(", ".join(each))
        joined.details = " ".join(getattr(one, "details", "") for one in each)
        return joined

    return run


def values(response):
    return "; ".join(
        f"{tensor.name}={from_raw(raw, tensor.datatype, tuple(tensor.shape), tensor.name).tolist()}"
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    )


def mixed(rows=1, text=b"a"):
    return raw_request(
        "mixed",
        real=np.full((rows, 4), 1.5, np.float32),
        whole=np.full((rows, 2), 7, np.int64),
        text=np.array([[text]] * rows, np.object_),
    )


def flat(*numbers, model="flat"):
    return raw_request(model, x=np.array(numbers or (1.5, 2.5), np.float32))


def typed(message, index, **contents):
    del message.raw_input_contents[:]
    for name, items in contents.items():
        getattr(message.inputs[index].contents, name).extend(items)
    return message


def slow(count):
    return raw_request("slow", steps=np.array([[count]], np.int64))


def parameter(name, message=None, **value):
    message = message or flat()
    message.parameters[name].MergeFrom(pb.InferParameter(**value))
    return message


@contextmanager
def memory(data):
    """An object in shared memory; its key is the name of the file."""
    path = Path(f"/dev/shm/conformance-{os.getpid()}-{time.monotonic_ns()}")
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink()
