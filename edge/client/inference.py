"""Requests and answers of a client, and their conversion between NumPy and the protocol's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from edge.client.failures import EXHAUSTED, malformed, quoted
from edge.datatypes import NUMPY_TYPES, Array, datatype_of
from edge.errors import InvalidRequest, Raw, ServerError, UsageError
from edge.pb import inference_pb2 as pb
from edge.protocol import FINAL_RESPONSE, LOOPS, STOPPED, STREAM_PARTIAL, STREAM_RETRY_AFTER_MS
from edge.serving.wire import check_typed, from_raw, from_typed, to_raw

#: Parameters of a request by their type, which are sent unless they are None, empty or False.
_PARAMETERS = {
    "bool_param": ("timings", "logprobs", "ignore_eos"),
    "int64_param": ("max_loops", "max_tokens", "min_tokens", "top_k", "seed", "n_best"),
    "double_param": ("tolerance", "temperature", "top_p", "alpha", "threshold"),
    "string_param": ("tier", "policy", "head"),
}
_MAX_RANK = 32  # NumPy 1's limit


@dataclass(frozen=True, eq=False)
class InferRequest:
    """One request. :meth:`Client.infer` takes the same arguments.

    Attributes:
        model: name of the model.
        inputs: input tensors by name; text as arrays of ``bytes`` or ``str``, see :func:`text`.
        version: of the model; empty for the highest.
        outputs: names of the outputs to return; none for all of them.
        top: of each of ``outputs``, return so many of the largest values, as texts VALUE:INDEX:LABEL; 0 for the values.
        request_id: returned with the answer, and written to the server's log.
        priority: from 1, the highest, to 10; 0 for the server's default.
        tier: name of the tier to compute on; empty for the server's choice.
        policy: how the server chooses the tier, for example ``deadline``; empty for its default.
        max_loops: budget of a looped model, the most steps of each row; None for the model's default.
        tolerance: residual at which a row of a looped model ends; None for the model's default.
        max_tokens: of a generated text; None for the model's default.
        min_tokens: of it, before which it neither ends nor has a stop text; None for none.
        ignore_eos: whether the tokens that would end it do not.
        temperature: at which its tokens are drawn; 0 takes the likeliest, and so does None.
        top_k: draw from so many of the likeliest tokens; 0 or None for all. Of a detector, the most boxes of a picture;
            None for the model's default.
        top_p: draw from the fewest likeliest tokens whose probabilities sum up to this; None for all.
        seed: of the draws; None for a new one.
        stop: texts that end a generated one, which does not include them.
        head: model that moves the logits of the one that generates text, as NAME or NAME:VERSION; empty for none.
        alpha: how much it moves them; None for the head's own.
        logprobs: whether to return the tokens of a generated text and their log-probabilities, too.
        n_best: answers to each question to return, the likeliest first; None for one.
        threshold: score that boxes exceed, 0 to 1; None for the model's default.
        partial_answers: in a stream, whether a looped model also answers after each step, and a model that generates
            text with each piece of it. The last answer has the last piece.
        timings: whether to return the server's stage times.
        timeout_seconds: time limit, all attempts and pauses together. None is the client's default, and no limit in a
            stream.
        server: the only server to call; empty lets the servers take turns. A stream has one server for all its
            requests, so this is empty there.
    """

    model: str
    inputs: Mapping[str, Array]
    _: KW_ONLY
    version: str = ""
    outputs: Sequence[str] = ()
    top: int = 0
    request_id: str = ""
    priority: int = 0
    tier: str = ""
    policy: str = ""
    max_loops: int | None = None
    tolerance: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    head: str = ""
    alpha: float | None = None
    logprobs: bool = False
    n_best: int | None = None
    threshold: float | None = None
    partial_answers: bool = False
    timings: bool = False
    timeout_seconds: float | None = None
    server: str = ""


@dataclass(frozen=True, kw_only=True)
class CallInfo:
    """Address of the server that answered a call, number of attempts, and the client's time of the last."""

    server: str
    attempts: int = 1
    round_trip_ns: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class InferResult:
    """One answer.

    Attributes:
        outputs: the output tensors by name; read-only where they share memory with the message.
        tier: the tier that computed the answer; empty if the model has only one.
        tier_reason: why it was that tier: ``full``, ``requested``, ``pinned``, ``router``, ``deadline`` or ``load``.
        stopped: why a looped model ended: ``deadline`` if the policy cut a row short, ``budget`` if a row used up its
            loops, else ``tolerance``; of a generated text ``deadline``, ``length`` if one has the most tokens, else
            ``stop``; empty for other models.
        final: whether this is the last answer to its request; False for partial answers.
        timings_ns: the server's stage times, if the request has ``timings``.
    """

    outputs: dict[str, Array]
    model: str
    model_version: str
    request_id: str
    tier: str
    tier_reason: str
    stopped: str
    final: bool
    timings_ns: dict[str, int]
    call: CallInfo

    @property
    def loops(self) -> Array | None:
        """The loops of each row, [rows, 1]; None if the model is not looped, or the request left this output out."""
        return self.outputs.get(LOOPS) if self.stopped else None

    @property
    def round_trip_ns(self) -> int:
        """Time of the answered attempt, as the client measured it."""
        return self.call.round_trip_ns


@dataclass(frozen=True, kw_only=True)
class InferFailure:
    """The answer in a stream to a request that failed; the stream goes on.

    Attributes:
        message: the server's error message.
        retry_after_ms: the server's hint when to try again; 0 without one.
    """

    request_id: str
    model: str
    message: str
    retry_after_ms: int
    call: CallInfo

    def error(self) -> ServerError:
        """Return the error for it, without a status code, which streams do not carry, unless it may be retried."""
        return ServerError(
            f"model {self.model!r} at {self.call.server}, in a stream",
            given=Raw("a failure"),
            expected="an answer",
            fix=quoted(self.message),
            code=EXHAUSTED if self.retry_after_ms else "",
            server=self.call.server,
            retry_after_ms=self.retry_after_ms,
        )


def text(values: Sequence[str]) -> Array:
    """Return texts as a BYTES tensor of shape (len(values), 1)."""
    array = np.empty((len(values), 1), np.object_)
    # Bytes of a command line that are not UTF-8 are sent unchanged; the server refuses them.
    array[:, 0] = [value.encode(errors="surrogateescape") for value in values]
    return array


def encode(request: InferRequest, *, in_stream: bool = False) -> pb.ModelInferRequest:
    """Return the protocol's message for a request, or raise a UsageError. In a stream its time limit is a parameter."""
    if in_stream and request.server:
        fix = "Give server= to infer_stream."
        raise UsageError("server of a request in a stream", given=request.server, expected="none", fix=fix)
    if request.partial_answers and not in_stream:
        fix = "Use infer_stream."
        raise UsageError("partial_answers of a single request", given=True, expected="False", fix=fix)
    message = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.request_id)
    for name, array in request.inputs.items():
        datatype = _datatype(name, array)
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(to_raw(array, datatype))
    for name in request.outputs:
        output = message.outputs.add(name=name)
        if request.top:
            output.parameters["classification"].int64_param = request.top
    parameters = message.parameters
    if request.priority:
        parameters["priority"].int64_param = request.priority
    if request.partial_answers:
        parameters[STREAM_PARTIAL].bool_param = True
    for kind, names in _PARAMETERS.items():
        for name in names:
            if (value := getattr(request, name)) is not None and value is not False and value != "":
                setattr(parameters[name], kind, value)
    if request.stop:
        parameters["stop"].string_param = json.dumps([*request.stop])
    if in_stream and request.timeout_seconds is not None:
        parameters["timeout"].int64_param = max(int(checked_timeout(request.timeout_seconds) * 1e6), 1)
    return message


def checked_timeout(seconds: float) -> float:
    """Return ``seconds``, or raise a UsageError if that is not a time limit."""
    if not 0 < seconds < 1e9:
        fix = "Give the seconds to wait."
        raise UsageError("timeout_seconds", given=seconds, expected="a finite number above 0", fix=fix)
    return seconds


def _datatype(name: str, array: Array) -> str:
    subject = f"input {name!r}"
    if not isinstance(array, np.ndarray):
        given = Raw(type(array).__name__)
        raise UsageError(subject, given=given, expected="a NumPy array", fix="Wrap it in np.asarray, or in text().")
    try:
        datatype = datatype_of(array)
    except KeyError:
        fix = "Convert it with .astype to what ModelMetadata says."
        known = ", ".join(NUMPY_TYPES)
        raise UsageError(subject, given=array.dtype.name, expected=f"a type for one of {known}", fix=fix) from None
    if array.dtype.kind == "O":
        wrong = [item for item in array.ravel().tolist() if not isinstance(item, bytes | str)]
        if wrong:
            raise UsageError(subject, given=wrong[0], expected="bytes or str in it", fix="Convert every element.")
    return datatype


def decode(response: pb.ModelInferResponse, call: CallInfo) -> InferResult:
    """Return the outputs of an answer, or raise a ServerError if it contradicts itself or the protocol."""
    subject = f"the answer of model {response.model_name!r}"
    raw, parameters = response.raw_output_contents, response.parameters
    if raw and len(raw) != len(response.outputs):
        given, expected = f"{len(raw)} raw_output_contents", f"{len(response.outputs)}, one for each output"
        raise malformed(subject, call.server, given, expected)
    final = FINAL_RESPONSE not in parameters or parameters[FINAL_RESPONSE].bool_param
    outputs: dict[str, Array] = {}
    for index, tensor in enumerate(response.outputs):
        if tensor.name in outputs:
            raise malformed(subject, call.server, f"output {tensor.name!r} twice", "each output once")
        outputs[tensor.name] = _tensor(tensor, raw[index] if raw else None, f"{subject}, output {tensor.name!r},", call)
    return InferResult(
        outputs=outputs,
        model=response.model_name,
        model_version=response.model_version,
        request_id=response.id,
        tier=parameters["tier"].string_param,  # a map of Protobuf adds what it lacks, empty
        tier_reason=parameters["tier_reason"].string_param,
        stopped=parameters[STOPPED].string_param,
        final=final,
        timings_ns={name: value.int64_param for name, value in parameters.items() if name.endswith("_ns")},
        call=call,
    )


def _tensor(tensor: pb.ModelInferResponse.InferOutputTensor, raw: bytes | None, subject: str, call: CallInfo) -> Array:
    shape = tuple(tensor.shape)
    if tensor.datatype not in NUMPY_TYPES:
        given, expected = f"the datatype {tensor.datatype!r}", f"one of {', '.join(NUMPY_TYPES)}"
        raise malformed(subject, call.server, given, expected)
    if len(shape) > _MAX_RANK or any(size < 0 for size in shape):
        raise malformed(subject, call.server, f"the shape {list(shape)}", "a shape of 0 or more in each dimension")
    try:
        # Servers answer either all outputs raw, or all of them typed with no raw_output_contents at all.
        if raw is None:
            check_typed(tensor.contents, tensor.datatype, shape, "contents")
            return from_typed(tensor.contents, tensor.datatype, shape, "contents")
        return from_raw(raw, tensor.datatype, shape, "raw_output_contents")
    except InvalidRequest as error:
        raise malformed(subject, call.server, str(error.given), error.expected) from None
    except (ValueError, OverflowError) as error:  # a shape beyond NumPy's limits, or a number out of range
        raise malformed(subject, call.server, str(error), f"{tensor.datatype} {list(shape)}") from None


def decode_in_stream(response: pb.ModelStreamInferResponse, call: CallInfo) -> InferResult | InferFailure:
    """Return the answer in a message of a stream; as :func:`decode`."""
    inner = response.infer_response
    if not response.error_message:
        return decode(inner, call)
    after = max(inner.parameters[STREAM_RETRY_AFTER_MS].int64_param, 0)
    message = response.error_message
    return InferFailure(request_id=inner.id, model=inner.model_name, message=message, retry_after_ms=after, call=call)
