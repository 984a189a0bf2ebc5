"""A client of one server, and cases: the outcomes of its calls as text that can be compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.datatypes import Array, datatype_of
from edge.pb import inference_pb2 as pb
from edge.pb.pool import POOL
from edge.serving.wire import from_raw, to_raw

SERVICE: Final = "inference.GRPCInferenceService"
_METHODS = {method.name: method for method in POOL.FindServiceByName(SERVICE).methods}
_SECONDS = 30.0
View = Callable[[Any], object]


class Peer:
    """A client of the server at ``host:port``."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.insecure_channel(url, options=[("grpc.max_send_message_length", -1)])

    def send(self, method: str, request: Message | bytes = b"", timeout: float = _SECONDS) -> Any:
        return self.start(method, request, timeout).result()

    def start(self, method: str, request: Message | bytes = b"", timeout: float = _SECONDS) -> Any:
        """Send one message, and return the call."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        parse = GetMessageClass(_METHODS[method].output_type).FromString if method in _METHODS else None
        call = self.channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=parse)
        return call.future(data, timeout=timeout)

    def infer(self, request: pb.ModelInferRequest, timeout: float = _SECONDS) -> Any:
        return self.start("ModelInfer", request, timeout)

    def stream(self, requests: Iterable[Message | bytes], timeout: float = _SECONDS) -> Any:
        """Open a stream; iterating over it gives the responses."""
        call = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
        )
        messages = (r if isinstance(r, bytes) else r.SerializeToString() for r in requests)
        return call(messages, timeout=timeout)

    def health(self, service: str) -> str:
        stub, request = health_pb2_grpc.HealthStub(self.channel), health_pb2.HealthCheckRequest(service=service)
        name_of = health_pb2.HealthCheckResponse.ServingStatus.Name
        return outcome(lambda: stub.Check(request, timeout=_SECONDS), lambda response: name_of(response.status))

    def executions(self, model: str, version: str = "1") -> int:
        request = pb.ModelStatisticsRequest(name=model, version=version)
        (statistics,) = self.send("ModelStatistics", request).model_stats
        return int(statistics.execution_count)


class Outcome(str):
    """The outcome of a call, and its error messages."""

    details = ""


#: Sends requests to a server, and returns the outcome.
Action = Callable[[Peer], str]


class Case(NamedTuple):
    """An action on both servers; without an outcome, DIFFERENCES.md has both servers' outcomes.

    ``action`` leaves the server as it was, and ``text`` is part of this server's error message.
    """

    name: str
    action: Action
    outcome: str = ""
    text: str = ""


def outcome(call: Callable[[], Any], view: View | None = None) -> Outcome:
    """Return the status of a call, and a view of its response."""
    try:
        response = call()
    except grpc.RpcError as error:
        failed = Outcome(error.code().name)
        failed.details = error.details() or ""
        return failed
    return Outcome("OK" if view is None else f"OK: {view(response)}")


def call(
    method: str, request: Message | bytes = b"", view: View | None = None, timeout: float = _SECONDS, **fields: Any
) -> Action:
    """Send one message: ``request``, or one with these fields."""
    message = GetMessageClass(_METHODS[method].input_type)(**fields) if fields else request
    return lambda peer: outcome(lambda: peer.send(method, message, timeout), view)


def infer(request: pb.ModelInferRequest | bytes, view: View | None = None) -> Action:
    return call("ModelInfer", request, view)


def invalid(name: str, message: pb.ModelInferRequest, text: str) -> Case:
    return Case(name, infer(message), "INVALID_ARGUMENT", text)


def steps(*actions: Action) -> Action:
    def run(peer: Peer) -> Outcome:
        each = [action(peer) for action in actions]
        joined = Outcome(", ".join(each))
        joined.details = " ".join(getattr(one, "details", "") for one in each)
        return joined

    return run


def values(response: pb.ModelInferResponse) -> str:
    return "; ".join(
        f"{tensor.name}={from_raw(raw, tensor.datatype, tuple(tensor.shape), tensor.name).tolist()}"
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    )


def request(model: str, *, version: str = "", identity: str = "", **inputs: Array) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=identity)
    for name, array in inputs.items():
        datatype = datatype_of(array)
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(to_raw(array, datatype))
    return message


def mixed(rows: int = 1, text: bytes = b"a") -> pb.ModelInferRequest:
    return request(
        "mixed",
        real=np.full((rows, 4), 1.5, np.float32),
        whole=np.full((rows, 2), 7, np.int64),
        text=np.array([[text]] * rows, np.object_),
    )


def flat(*numbers: float, model: str = "flat") -> pb.ModelInferRequest:
    return request(model, x=np.array(numbers or (1.5, 2.5), np.float32))


def typed(message: pb.ModelInferRequest, index: int, **contents: Any) -> pb.ModelInferRequest:
    del message.raw_input_contents[:]
    for name, items in contents.items():
        getattr(message.inputs[index].contents, name).extend(items)
    return message


def slow(count: int) -> pb.ModelInferRequest:
    return request("slow", steps=np.array([[count]], np.int64))


def shaped(message: pb.ModelInferRequest, index: int, *shape: int) -> pb.ModelInferRequest:
    message.inputs[index].ClearField("shape")
    message.inputs[index].shape.extend(shape)
    return message


def parameter(name: str, message: pb.ModelInferRequest | None = None, **value: Any) -> pb.ModelInferRequest:
    message = message or flat()
    message.parameters[name].MergeFrom(pb.InferParameter(**value))
    return message


@contextmanager
def memory(data: bytes) -> Iterator[Path]:
    """An object in shared memory; its key is the name of the file."""
    path = Path(f"/dev/shm/conformance-{os.getpid()}-{time.monotonic_ns()}")
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink()
