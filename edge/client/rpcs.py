"""RPCs of the clients, described without a transport.

Most functions here describe a method of :class:`~edge.client.Client` and :class:`~edge.client.aio.AsyncClient`, which
have the same parameters and docstring.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

from edge.client.failures import malformed
from edge.client.inference import CallInfo, InferFailure, InferRequest, InferResult, decode, decode_in_stream, encode
from edge.datatypes import TensorSpec
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.protocol import FINAL_RESPONSE, PREPROCESS, SPACE

P = ParamSpec("P")
R = TypeVar("R")
#: One answer of a stream.
StreamAnswer = InferResult | InferFailure
#: Inputs and outputs of a model.
Specs = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


@dataclass(frozen=True)
class CallSpec(Generic[R]):
    """One call; ``subject`` is that of error messages, and ``read`` converts the server's message.

    Attributes:
        timeout_seconds: time limit, all attempts together; None is the client's default.
        server: the only server to call; empty lets the servers take turns.
        repeatable: whether a failed call is repeated; where there are several, another one must name its server.
    """

    method: str
    request: Any
    subject: str
    read: Callable[[Any, CallInfo], R]
    _: KW_ONLY
    timeout_seconds: float | None = None
    server: str = ""
    repeatable: bool = True


def as_method_of(rpc: Callable[..., CallSpec[Any]], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a client's method with the name, signature and docstring of the RPC that it calls."""
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.Signature([this, *inspect.signature(rpc).parameters.values()])
    vars(method).update(__signature__=signature)
    method.__name__, method.__doc__ = rpc.__name__, rpc.__doc__
    return method


def _infer(make: Callable[P, InferRequest]) -> Callable[P, CallSpec[InferResult]]:
    def infer(*arguments: P.args, **options: P.kwargs) -> CallSpec[InferResult]:
        """Send one request, and return the answer; the arguments are the attributes of :class:`InferRequest`."""
        request = make(*arguments, **options)
        limit, subject = request.timeout_seconds, f"model {request.model!r}"
        return CallSpec("ModelInfer", encode(request), subject, decode, timeout_seconds=limit, server=request.server)

    infer.__signature__ = inspect.signature(make)  # type: ignore[attr-defined]
    return infer


infer = _infer(InferRequest)


def metadata(model: str, version: str = "", *, server: str = "") -> CallSpec[Specs]:
    """Return the inputs and the outputs of a model."""
    request, subject = pb.ModelMetadataRequest(name=model, version=version), f"model {model!r}"
    return CallSpec(
        "ModelMetadata", request, subject, lambda it, call: (_specs(it.inputs), _specs(it.outputs)), server=server
    )


def preprocess(model: str, version: str = "", *, server: str = "") -> CallSpec[str]:
    """Return the type of the step that reads a model's texts or images, such as ``image``; empty without one."""
    return _config_parameter(PREPROCESS, model, version, server)


def space(model: str, version: str = "", *, server: str = "") -> CallSpec[str]:
    """Return the space of a model's embeddings, whichever tier computes them; empty if its tiers do not share one.

    Embeddings of all models and tiers with the same space can be compared with one another.
    """
    return _config_parameter(SPACE, model, version, server)


def _config_parameter(name: str, model: str, version: str, server: str) -> CallSpec[str]:
    request, subject = pb.ModelConfigRequest(name=model, version=version), f"model {model!r}"
    return CallSpec(
        "ModelConfig", request, subject, lambda it, call: it.config.parameters[name].string_value, server=server
    )


def _specs(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)


def index(*, server: str = "") -> CallSpec[list[dict[str, str]]]:
    """Return name, version, state and reason of every model in the repository of one server."""

    def read(response: Any, call: CallInfo) -> list[dict[str, str]]:
        fields = ("name", "version", "state", "reason")
        return [{name: getattr(model, name) for name in fields} for model in response.models]

    return CallSpec("RepositoryIndex", pb.RepositoryIndexRequest(), "repository", read, server=server)


def load(model: str, *, timeout_seconds: float | None = None, server: str = "") -> CallSpec[None]:
    """Load or reload a model; where there are several servers, ``server`` must name one.

    The call is never repeated: after a broken connection it may have been carried out.
    """
    return _control("Load", pb.RepositoryModelLoadRequest(model_name=model), timeout_seconds, server)


def unload(model: str, *, timeout_seconds: float | None = None, server: str = "") -> CallSpec[None]:
    """Unload a model; as :meth:`load`."""
    return _control("Unload", pb.RepositoryModelUnloadRequest(model_name=model), timeout_seconds, server)


def _control(verb: str, request: Any, timeout_seconds: float | None, server: str) -> CallSpec[None]:
    return CallSpec(
        f"RepositoryModel{verb}",
        request,
        f"model {request.model_name!r}",
        lambda response, call: None,
        timeout_seconds=timeout_seconds,
        server=server,
        repeatable=False,
    )


def ready(model: str, version: str, server: str) -> CallSpec[bool]:
    """Return whether a model, or the server as a whole, is ready. Not repeated: a failed call means not ready."""
    spec = CallSpec[bool]("ServerReady", pb.ServerReadyRequest(), "server", lambda it, call: it.ready, server=server)
    if model:
        request = pb.ModelReadyRequest(name=model, version=version)
        spec = replace(spec, method="ModelReady", request=request, subject=f"model {model!r}")
    return replace(spec, repeatable=False)


def live(timeout_seconds: float | None) -> CallSpec[str]:
    """Return the address of a server that answers."""
    request, limit = pb.ServerLiveRequest(), timeout_seconds
    return CallSpec("ServerLive", request, "server", lambda response, call: call.server, timeout_seconds=limit)


def telemetry(*, server: str = "") -> CallSpec[telemetry_pb2.Reading]:
    """Return one telemetry reading of one server."""
    return CallSpec("Get", telemetry_pb2.GetRequest(), "telemetry", lambda response, call: response, server=server)


class PendingRequests:
    """Requests of one stream that have no answer yet."""

    def __init__(self) -> None:
        self._sent: deque[tuple[str, int]] = deque()  # request id, and when
        self._failure: Exception | None = None

    def encode_all(self, requests: Iterable[InferRequest]) -> Iterator[pb.ModelInferRequest]:
        """Yield the messages of requests; keep what ``requests`` raises for :meth:`check`, because gRPC hides it."""
        try:
            yield from map(self.encode, requests)
        except Exception as error:
            self._failure = error

    async def encode_each(self, requests: AsyncIterable[InferRequest]) -> AsyncIterator[pb.ModelInferRequest]:
        """Yield the messages of asynchronous requests; as :meth:`encode_all`."""
        try:
            async for request in requests:
                yield self.encode(request)
        except Exception as error:
            self._failure = error

    def check(self) -> None:
        """Raise what the iterator of requests raised."""
        if self._failure:
            raise self._failure

    def encode(self, request: InferRequest) -> pb.ModelInferRequest:
        """Return the message of a request, and count it as sent."""
        message = encode(request, in_stream=True)
        self._sent.append((request.request_id, time.perf_counter_ns()))
        return message

    def decode(self, response: pb.ModelStreamInferResponse, server: str) -> StreamAnswer:
        """Return the next answer; raise a ServerError if it contradicts the protocol, or belongs to no request."""
        if not self._sent:
            raise malformed("a stream", server, "one more answer", "one for each request")
        answer = response.infer_response
        # Requests with several answers may be answered out of order; without ids, the first one is meant.
        index = next((index for index, (sent, _) in enumerate(self._sent) if sent == answer.id), 0)
        started_ns = self._sent[index][1]
        if FINAL_RESPONSE not in answer.parameters or answer.parameters[FINAL_RESPONSE].bool_param:
            del self._sent[index]
        return decode_in_stream(response, CallInfo(server=server, round_trip_ns=time.perf_counter_ns() - started_ns))
