"""What a client asks and what it gets: NumPy to the messages of the protocol and back, without a transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge.client.refusals import EXHAUSTED, RETRY_AFTER_PARAMETER, malformed
from edge.datatypes import NUMPY_TYPES, Array, datatype_of
from edge.errors import InvalidRequest, Literally, ServerError, UsageError
from edge.pb import inference_pb2 as pb
from edge.serving.wire import from_raw, from_typed, to_raw

_MAX_RANK = 32  # NumPy 1's limit


@dataclass(frozen=True, kw_only=True, eq=False)
class InferRequest:
    """One question.

    Attributes:
        model: its name.
        inputs: by name; text as arrays of ``bytes`` or ``str``.
        version: of the model; empty for the highest.
        outputs: which to send back; none means all of them.
        request_id: comes back with the answer, and stands in the server's log.
        priority: from 1, the highest, to 10; 0 is the server's default.
        tier: which tier shall answer; empty leaves it open.
        policy: how the server shall choose the tier; empty for its own way.
        timings: whether to send the stage times too.
        timeout_seconds: how long to wait; None is the client's default, and no limit in a stream.
    """

    model: str
    inputs: Mapping[str, Array]
    version: str = ""
    outputs: Sequence[str] = ()
    request_id: str = ""
    priority: int = 0
    tier: str = ""
    policy: str = ""
    timings: bool = False
    timeout_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trip:
    """How an answer came.

    Attributes:
        server: that gave it.
        attempts: how often servers were asked for it; see :mod:`edge.client.retries`.
        round_trip_ns: what the client saw of the attempt that was answered.
    """

    server: str
    attempts: int = 1
    round_trip_ns: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class InferResult:
    """One answer.

    Attributes:
        outputs: the output tensors by name; they may share memory with the message, and cannot be written to then.
        model: which answered.
        model_version: of the model.
        request_id: as it was asked.
        tier: which tier answered; empty for a model of one.
        tier_reason: why it was that one.
        timings_ns: the server's stage times, when they were asked for.
        trip: which server, after how many attempts, and the time that the client saw.
    """

    outputs: dict[str, Array]
    model: str
    model_version: str
    request_id: str
    tier: str
    tier_reason: str
    timings_ns: dict[str, int]
    trip: Trip

    @property
    def round_trip_ns(self) -> int:
        """What the client saw of the attempt that was answered."""
        return self.trip.round_trip_ns


@dataclass(frozen=True, kw_only=True)
class InferFailure:
    """The answer in a stream to a request that failed; the stream goes on.

    Attributes:
        request_id: as it was asked.
        model: as it was asked.
        message: what the server says.
        retry_after_ms: when there may be room; 0 where nothing is known.
        trip: which server it was, and the time that the client saw.
    """

    request_id: str
    model: str
    message: str
    retry_after_ms: int
    trip: Trip

    def error(self) -> ServerError:
        """Return the error that a call of its own would have raised; streams tell no status."""
        return ServerError(
            f"model {self.model!r} at {self.trip.server}, in a stream",
            given=Literally(self.message),
            expected="an answer",
            fix="Send it again later." if self.retry_after_ms else "Correct the request.",
            code=EXHAUSTED if self.retry_after_ms else "",
            server=self.trip.server,
            retry_after_ms=self.retry_after_ms,
        )


def text(values: Sequence[str]) -> Array:
    """Return texts as a BYTES tensor of shape (len(values), 1)."""
    array = np.empty((len(values), 1), np.object_)
    # What came from a command line and is no UTF-8 is sent as it was, and the server says so.
    array[:, 0] = [value.encode(errors="surrogateescape") for value in values]
    return array


def encode(request: InferRequest, *, in_stream: bool = False) -> pb.ModelInferRequest:
    """Return the message for a question.

    Args:
        request: the question.
        in_stream: whether its time limit has to travel with it; the deadline of a call does that otherwise.

    Raises:
        UsageError: an input is no tensor of the protocol, or the time limit is no time.
    """
    message = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.request_id)
    for name, array in request.inputs.items():
        datatype = _datatype(name, array)
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(to_raw(array, datatype))
    for name in request.outputs:
        message.outputs.add(name=name)
    if request.priority:
        message.parameters["priority"].int64_param = request.priority
    if request.timings:
        message.parameters["timings"].bool_param = True
    for name, value in (("tier", request.tier), ("policy", request.policy)):
        if value:
            message.parameters[name].string_param = value
    if in_stream and request.timeout_seconds is not None:
        message.parameters["timeout"].int64_param = max(int(checked_timeout(request.timeout_seconds) * 1e6), 1)
    return message


def infer_request(model: str, inputs: Mapping[str, Array], *, version: str = "") -> pb.ModelInferRequest:
    """Return the message that asks a model and nothing else; as :func:`encode`."""
    return encode(InferRequest(model=model, inputs=inputs, version=version))


def checked_timeout(seconds: float) -> float:
    """Return a time limit that can be sent.

    Raises:
        UsageError: it is not above 0, or is no number.
    """
    if not 0 < seconds < 1e9:
        fix = "Give the seconds that you can wait."
        raise UsageError("timeout_seconds", given=seconds, expected="more than 0, and less than for ever", fix=fix)
    return seconds


def _datatype(name: str, array: Array) -> str:
    subject = f"input {name!r}"
    if not isinstance(array, np.ndarray):
        given = Literally(type(array).__name__)
        raise UsageError(subject, given=given, expected="a NumPy array", fix="Wrap it in np.asarray, or in text().")
    try:
        datatype = datatype_of(array)
    except KeyError:
        fix = "Convert it with .astype to what ModelMetadata says."
        known = ", ".join(NUMPY_TYPES)
        raise UsageError(subject, given=array.dtype.name, expected=f"a type for one of {known}", fix=fix) from None
    if array.dtype.kind == "O":
        for item in array.ravel().tolist():
            if not isinstance(item, bytes | str):
                raise UsageError(subject, given=item, expected="bytes or str in it", fix="Convert every element.")
    return datatype


def decode(response: pb.ModelInferResponse, trip: Trip) -> InferResult:
    """Read an answer.

    Raises:
        ServerError: it contradicts itself or the protocol.
    """
    subject = f"the answer of model {response.model_name!r}"
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        given, expected = f"{len(raw)} raw_output_contents", f"{len(response.outputs)}, one for each output"
        raise malformed(subject, trip.server, given, expected)
    outputs: dict[str, Array] = {}
    for index, tensor in enumerate(response.outputs):
        if tensor.name in outputs:
            raise malformed(subject, trip.server, f"output {tensor.name!r} twice", "each output once")
        outputs[tensor.name] = _tensor(tensor, raw[index] if raw else None, f"{subject}, output {tensor.name!r},", trip)
    parameters = response.parameters
    return InferResult(
        outputs=outputs,
        model=response.model_name,
        model_version=response.model_version,
        request_id=response.id,
        tier=parameters["tier"].string_param if "tier" in parameters else "",
        tier_reason=parameters["tier_reason"].string_param if "tier_reason" in parameters else "",
        timings_ns={name: value.int64_param for name, value in parameters.items() if name.endswith("_ns")},
        trip=trip,
    )


def _tensor(tensor: pb.ModelInferResponse.InferOutputTensor, raw: bytes | None, subject: str, trip: Trip) -> Array:
    shape = tuple(tensor.shape)
    if tensor.datatype not in NUMPY_TYPES:
        given, expected = f"the datatype {tensor.datatype!r}", f"one of {', '.join(NUMPY_TYPES)}"
        raise malformed(subject, trip.server, given, expected)
    if len(shape) > _MAX_RANK or any(size < 0 for size in shape):
        raise malformed(subject, trip.server, f"the shape {list(shape)}", "a shape of 0 or more in each dimension")
    try:
        # Most servers answer raw. Those that answer typed leave raw_output_contents out altogether.
        if raw is None:
            return from_typed(tensor.contents, tensor.datatype, shape, "contents")
        return from_raw(raw, tensor.datatype, shape, "raw_output_contents")
    except InvalidRequest as error:
        raise malformed(subject, trip.server, str(error.given), error.expected) from None
    except (ValueError, OverflowError) as error:  # a shape that NumPy cannot make, or a number that does not fit
        raise malformed(subject, trip.server, str(error), f"{tensor.datatype} {list(shape)}") from None


def decode_in_stream(response: pb.ModelStreamInferResponse, trip: Trip) -> InferResult | InferFailure:
    """Read an answer of a stream.

    Raises:
        ServerError: it contradicts itself or the protocol.
    """
    inner = response.infer_response
    if not response.error_message:
        return decode(inner, trip)
    after = inner.parameters[RETRY_AFTER_PARAMETER].int64_param if RETRY_AFTER_PARAMETER in inner.parameters else 0
    return InferFailure(
        request_id=inner.id,
        model=inner.model_name,
        message=response.error_message,
        retry_after_ms=max(after, 0),
        trip=trip,
    )
