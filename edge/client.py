"""A thin client: NumPy in, NumPy out, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import grpc
import numpy as np

from edge.datatypes import Array, TensorSpec, datatype_of
from edge.errors import Literally, ServerError
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from edge.wire import from_raw, to_raw

DEFAULT_URL = "127.0.0.1:8001"
_ADVICE = {
    grpc.StatusCode.UNAVAILABLE: "Is it running? `fewheads serve REPOSITORY` starts one, --url names another.",
    grpc.StatusCode.DEADLINE_EXCEEDED: "Allow more time, or ask a server that has less to do.",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "Send it again later, or in smaller parts.",
    grpc.StatusCode.INTERNAL: "The server's log tells more.",
}


class InferResult(NamedTuple):
    """One answer.

    Attributes:
        outputs: the output tensors by name.
        model_version: which version answered.
        timings_ns: the server's stage times, when they were asked for.
        round_trip_ns: what the client saw.
        tier: which tier answered; empty for a model of one.
    """

    outputs: dict[str, Array]
    model_version: str
    timings_ns: dict[str, int]
    round_trip_ns: int
    tier: str


class Client:
    """A connection to one server; safe to share between threads.

    Args:
        url: ``host:port``.
        timeout_seconds: the deadline of every call.
    """

    def __init__(self, url: str = DEFAULT_URL, timeout_seconds: float = 10.0) -> None:
        self.url = url
        self._timeout = timeout_seconds
        limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(url, options=limits)
        self._stub = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._telemetry = telemetry_pb2_grpc.TelemetryStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str = "",
        timings: bool = False,
        policy: str = "",
    ) -> InferResult:
        """Ask a model.

        Args:
            model: its name.
            inputs: its inputs by name; text as arrays of ``bytes`` or ``str``.
            version: empty for the highest.
            timings: ask for the stage times too.
            policy: which tier shall answer; empty for the server's choice.

        Raises:
            ServerError: the server cannot be reached, or refused; the message holds its status and text.
        """
        request = pb.ModelInferRequest(model_name=model, model_version=version)
        for name, array in inputs.items():
            datatype = datatype_of(array)
            request.inputs.add(name=name, datatype=datatype, shape=array.shape)
            request.raw_input_contents.append(to_raw(array, datatype))
        if timings:
            request.parameters["timings"].bool_param = True
        if policy:
            request.parameters["policy"].string_param = policy
        started_ns = time.perf_counter_ns()
        response = self._call(self._stub.ModelInfer, request, f"model {model!r}")
        round_trip_ns = time.perf_counter_ns() - started_ns
        outputs = {
            tensor.name: from_raw(raw, tensor.datatype, tuple(tensor.shape), f"output {tensor.name!r}")
            for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        stages = {name: value.int64_param for name, value in response.parameters.items() if name.endswith("_ns")}
        tier = response.parameters["tier"].string_param if "tier" in response.parameters else ""
        return InferResult(outputs, response.model_version, stages, round_trip_ns, tier)

    def metadata(self, model: str, version: str = "") -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return a model's inputs and outputs.

        Raises:
            ServerError: as :meth:`infer`.
        """
        request = pb.ModelMetadataRequest(name=model, version=version)
        response = self._call(self._stub.ModelMetadata, request, f"model {model!r}")

        def specs(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)

        return specs(response.inputs), specs(response.outputs)

    def index(self) -> list[dict[str, str]]:
        """Return name, version, state and reason of every bundle.

        Raises:
            ServerError: as :meth:`infer`.
        """
        response = self._call(self._stub.RepositoryIndex, pb.RepositoryIndexRequest(), "repository")
        return [
            {"name": model.name, "version": model.version, "state": model.state, "reason": model.reason}
            for model in response.models
        ]

    def telemetry(self) -> telemetry_pb2.Reading:
        """Return one telemetry reading.

        Raises:
            ServerError: as :meth:`infer`.
        """
        reading: telemetry_pb2.Reading = self._call(self._telemetry.Get, telemetry_pb2.GetRequest(), "telemetry")
        return reading

    def ready(self) -> bool:
        """Say whether the server is ready; one that cannot be reached is not."""
        try:
            return bool(self._call(self._stub.ServerReady, pb.ServerReadyRequest(), "server").ready)
        except ServerError:
            return False

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _call(self, method: Any, request: Any, subject: str) -> Any:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            fix = _ADVICE.get(code, "Correct the request.")
            given = Literally(f"{code.name} ({details})")
            raise ServerError(f"{subject} at {self.url}", given=given, expected="an answer", fix=fix) from None


def text(values: Sequence[str]) -> Array:
    """Return texts as a BYTES tensor of shape (len(values), 1)."""
    array = np.empty((len(values), 1), np.object_)
    # What came from a command line and is no UTF-8 is sent as it was, and the server says so.
    array[:, 0] = [value.encode(errors="surrogateescape") for value in values]
    return array
