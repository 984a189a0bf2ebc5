"""RPCs of the clients, described without a transport.

Most functions here describe a method of :class:`~edge.client.Client` and :class:`~edge.client.aio.AsyncClient`, which
have the same parameters and docstring.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from edge.client.failures import malformed
from edge.client.inference import CallInfo, InferFailure, InferRequest, InferResult, decode, decode_in_stream, encode
from edge.datatypes import TensorSpec
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.protocol import FINAL_RESPONSE

P = ParamSpec("P")
R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., Any])
#: One answer of a stream.
StreamAnswer = InferResult | InferFailure
#: Inputs and outputs of a model.
Specs = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


@dataclass(frozen=True, kw_only=True)
class Rpc(Generic[R]):
    """One call; ``subject`` is that of error messages, and ``read`` converts the server's message.

    Attributes:
        timeout_seconds: time limit, all attempts together; None is the client's default.
        server: the only server to call; empty lets the servers take turns.
        changes_server: whether the server must be named where the client has several.
    """

    method: str
    request: Any
    subject: str
    read: Callable[[Any, CallInfo], R]
    timeout_seconds: float | None = None
    server: str = ""
    repeatable: bool = True
    changes_server: bool = False


def as_method_of(rpc: Callable[..., Rpc[Any]]) -> Callable[[Method], Method]:
    """Return a decorator that gives a client's method the name, signature and docstring of its RPC."""

    def decorate(method: Method) -> Method:
        named: Any = method
        named.__name__, named.__doc__ = rpc.__name__, rpc.__doc__
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        named.__signature__ = inspect.Signature([this, *inspect.signature(rpc).parameters.values()])
        return method

    return decorate


def _infer(make: Callable[P, InferRequest]) -> Callable[P, Rpc[InferResult]]:
    """Return the RPC ``infer``, whose parameters are those of ``make``."""

    def infer(*arguments: P.args, **options: P.kwargs) -> Rpc[InferResult]:
        """Send one request and return the answer.

        The arguments are the attributes of :class:`InferRequest`.

        Raises:
            ServerError: no server can be reached; the error holds status, server and number of attempts.
            ServerRefused: a server refused the request.
            UsageError: an input is not a tensor of the protocol, or an argument is out of range.
        """
        request = make(*arguments, **options)
        return Rpc(
            method="ModelInfer",
            request=encode(request),
            subject=f"model {request.model!r}",
            read=decode,
            timeout_seconds=request.timeout_seconds,
            server=request.server,
        )

    infer.__signature__ = inspect.signature(make)  # type: ignore[attr-defined]
    return infer


infer = _infer(InferRequest)


def metadata(model: str, version: str = "", *, server: str = "") -> Rpc[Specs]:
    """Return the inputs and the outputs of a model.

    Raises:
        ServerError: as :meth:`infer`.
    """
    return Rpc(
        method="ModelMetadata",
        request=pb.ModelMetadataRequest(name=model, version=version),
        subject=f"model {model!r}",
        read=lambda response, call: (_specs(response.inputs), _specs(response.outputs)),
        server=server,
    )


def _specs(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)


def index(*, server: str = "") -> Rpc[list[dict[str, str]]]:
    """Return name, version, state and reason of every model in the repository of one server.

    Raises:
        ServerError: as :meth:`infer`.
    """
    return Rpc(
        method="RepositoryIndex",
        request=pb.RepositoryIndexRequest(),
        subject="repository",
        read=lambda response, call: [
            {"name": model.name, "version": model.version, "state": model.state, "reason": model.reason}
            for model in response.models
        ],
        server=server,
    )


def load(model: str, *, timeout_seconds: float | None = None, server: str = "") -> Rpc[None]:
    """Load or reload a model. The call is never repeated: after a broken connection it may have been carried out.

    Raises:
        ServerError: as :meth:`infer`.
        UsageError: the client has several servers, and ``server`` names none of them.
    """
    return _control("Load", pb.RepositoryModelLoadRequest(model_name=model), timeout_seconds, server)


def unload(model: str, *, timeout_seconds: float | None = None, server: str = "") -> Rpc[None]:
    """Unload a model. The call is never repeated.

    Raises:
        ServerError: as :meth:`infer`.
        UsageError: as :meth:`load`.
    """
    return _control("Unload", pb.RepositoryModelUnloadRequest(model_name=model), timeout_seconds, server)


def _control(verb: str, request: Any, timeout_seconds: float | None, server: str) -> Rpc[None]:
    return Rpc(
        method=f"RepositoryModel{verb}",
        request=request,
        subject=f"model {request.model_name!r}",
        read=lambda response, call: None,
        timeout_seconds=timeout_seconds,
        server=server,
        repeatable=False,
        changes_server=True,
    )


def ready(model: str, version: str, server: str) -> Rpc[bool]:
    """Return whether a model, or the server as a whole, is ready. Not repeated: a failed call means not ready."""
    return Rpc(
        method="ModelReady" if model else "ServerReady",
        request=pb.ModelReadyRequest(name=model, version=version) if model else pb.ServerReadyRequest(),
        subject=f"model {model!r}" if model else "server",
        read=lambda response, call: bool(response.ready),
        server=server,
        repeatable=False,
    )


def telemetry(*, server: str = "") -> Rpc[telemetry_pb2.Reading]:
    """Return one telemetry reading of one server.

    Raises:
        ServerError: as :meth:`infer`.
    """
    request = telemetry_pb2.GetRequest()
    return Rpc(method="Get", request=request, subject="telemetry", read=lambda response, call: response, server=server)


class PendingRequests:
    """Requests of one stream that have no answer yet.

    Attributes:
        failure: what the caller's iterator of requests raised; gRPC would hide it.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._times_ns: deque[int] = deque()

    def encode(self, request: InferRequest) -> pb.ModelInferRequest:
        """Return the message of a request, and count it as sent."""
        message = encode(request, in_stream=True)
        self._times_ns.append(time.perf_counter_ns())
        return message

    def decode(self, response: pb.ModelStreamInferResponse, server: str) -> StreamAnswer:
        """Return the next answer.

        Raises:
            ServerError: it contradicts itself or the protocol, or belongs to no request.
        """
        if not self._times_ns:
            raise malformed("a stream", server, "one more answer", "one for each request")
        parameters = response.infer_response.parameters
        # Other servers may answer a request several times, and mark the last answer.
        more = FINAL_RESPONSE in parameters and not parameters[FINAL_RESPONSE].bool_param
        started_ns = self._times_ns[0] if more else self._times_ns.popleft()
        return decode_in_stream(response, CallInfo(server=server, round_trip_ns=time.perf_counter_ns() - started_ns))
