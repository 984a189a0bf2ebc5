"""The calls of a client as data: which method, what to send, how to read the answer, and whether it may be repeated.

The blocking client and the asyncio one differ in how they wait, and in nothing that is said here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from edge.client.inference import InferFailure, InferRequest, InferResult, Trip, decode, decode_in_stream, encode
from edge.client.refusals import malformed
from edge.datatypes import TensorSpec
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2

R = TypeVar("R")
#: What an answer in a stream may be.
StreamAnswer = InferResult | InferFailure
STREAM_INFER, WATCH = "ModelStreamInfer", "Watch"
_FINAL = "triton_final_response"
#: Inputs and outputs of a model.
Specs = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


@dataclass(frozen=True)
class Rpc(Generic[R]):
    """One call.

    Attributes:
        method: its name.
        request: the message.
        subject: what it is about, for errors.
        read: the answer from the message.
        repeatable: whether a server that got it twice would be as after once, and the client told the same.
    """

    method: str
    request: Any
    subject: str
    read: Callable[[Any, Trip], R]
    repeatable: bool = True


def infer(request: InferRequest) -> Rpc[InferResult]:
    """Ask a model."""
    return Rpc("ModelInfer", encode(request), f"model {request.model!r}", decode)


def metadata(model: str, version: str) -> Rpc[Specs]:
    """Ask for a model's inputs and outputs."""
    return Rpc("ModelMetadata", pb.ModelMetadataRequest(name=model, version=version), f"model {model!r}", _specs)


def _specs(response: pb.ModelMetadataResponse, trip: Trip) -> Specs:
    def read(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)

    return read(response.inputs), read(response.outputs)


def index() -> Rpc[list[dict[str, str]]]:
    """Ask for name, version, state and reason of every bundle."""
    return Rpc("RepositoryIndex", pb.RepositoryIndexRequest(), "repository", _models)


def _models(response: pb.RepositoryIndexResponse, trip: Trip) -> list[dict[str, str]]:
    return [
        {"name": model.name, "version": model.version, "state": model.state, "reason": model.reason}
        for model in response.models
    ]


def load_model(model: str) -> Rpc[None]:
    """Ask to load a model, or to load it again."""
    request = pb.RepositoryModelLoadRequest(model_name=model)
    return Rpc("RepositoryModelLoad", request, f"model {model!r}", _nothing, repeatable=False)


def unload_model(model: str) -> Rpc[None]:
    """Ask to unload a model."""
    request = pb.RepositoryModelUnloadRequest(model_name=model)
    return Rpc("RepositoryModelUnload", request, f"model {model!r}", _nothing, repeatable=False)


def _nothing(response: Any, trip: Trip) -> None:
    return None


def ready(model: str, version: str) -> Rpc[bool]:
    """Ask whether a model is ready, or the server as a whole. Not to be repeated: no answer is one too."""
    if not model:
        return Rpc("ServerReady", pb.ServerReadyRequest(), "server", _ready, repeatable=False)
    request = pb.ModelReadyRequest(name=model, version=version)
    return Rpc("ModelReady", request, f"model {model!r}", _ready, repeatable=False)


def _ready(response: Any, trip: Trip) -> bool:
    return bool(response.ready)


def telemetry() -> Rpc[telemetry_pb2.Reading]:
    """Ask for one reading."""
    return Rpc("Get", telemetry_pb2.GetRequest(), "telemetry", _reading)


def _reading(response: telemetry_pb2.Reading, trip: Trip) -> telemetry_pb2.Reading:
    return response


def watch(interval_ms: int) -> telemetry_pb2.WatchRequest:
    """Return what asks for readings."""
    return telemetry_pb2.WatchRequest(interval_ms=interval_ms)


class Sent:
    """The questions of one stream that have no answer yet.

    Attributes:
        failure: what the caller's own iterator of questions raised, if it did. gRPC would hide that; here it is raised
            where the answers are read, once those to the questions before it have come.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._times_ns: deque[int] = deque()

    def encode(self, request: InferRequest) -> pb.ModelInferRequest:
        """Return the message for a question that is being sent."""
        message = encode(request, in_stream=True)
        self._times_ns.append(time.perf_counter_ns())
        return message

    def decode(self, response: pb.ModelStreamInferResponse, server: str) -> StreamAnswer:
        """Read the next answer.

        Raises:
            ServerError: it contradicts itself or the protocol, or nobody asked for it.
        """
        if not self._times_ns:
            raise malformed("a stream", server, "one more answer", "one for each request")
        parameters = response.infer_response.parameters
        # Servers of other makers may answer a request several times, and mark the last one.
        more = _FINAL in parameters and not parameters[_FINAL].bool_param
        started_ns = self._times_ns[0] if more else self._times_ns.popleft()
        return decode_in_stream(response, Trip(server=server, round_trip_ns=time.perf_counter_ns() - started_ns))
