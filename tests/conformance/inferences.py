"""Cases about single inferences: models, versions, inputs, outputs, parameters, time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.case import Case
from tests.conformance.models import QUEUE_SIZE
from tests.conformance.peer import (
    Peer,
    call,
    flat,
    infer,
    mixed,
    outcome,
    parameter,
    request,
    shaped,
    slow,
    typed,
    values,
)

#: Seconds until a request is in its run.
_BEGUN = 0.03


def _typed_mixed() -> pb.ModelInferRequest:
    message = typed(mixed(), 0, fp32_contents=[1.5] * 4)
    return typed(typed(message, 1, int64_contents=[7, 7]), 2, bytes_contents=[b"a"])


def _changed(change: Callable[[pb.ModelInferRequest], object], message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    change(message)
    return message


def _raw(index: int, data: bytes, message: pb.ModelInferRequest | None = None) -> pb.ModelInferRequest:
    return _changed(lambda r: r.raw_input_contents.__setitem__(index, data), message or mixed())


def _outputs(*names: str, message: pb.ModelInferRequest | None = None) -> pb.ModelInferRequest:
    return _changed(lambda r: [r.outputs.add(name=name) for name in names], message or mixed())


def _twice(message: pb.ModelInferRequest) -> None:
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(message.raw_input_contents[0])


def _without_last(message: pb.ModelInferRequest) -> None:
    message.inputs.pop()
    message.raw_input_contents.pop()


def _classified() -> pb.ModelInferRequest:
    message = _outputs("real_out")
    message.outputs[0].parameters["classification"].int64_param = 1
    return message


def _head(response: pb.ModelInferResponse) -> str:
    return f"id={response.id!r} model={response.model_name} version={response.model_version}"


def _names(response: pb.ModelInferResponse) -> str:
    return " ".join(tensor.name for tensor in response.outputs)


def _kinds(response: pb.ModelInferResponse) -> str:
    shapes = " ".join(f"{tensor.datatype}{list(tensor.shape)}" for tensor in response.outputs)
    typed_too = any(tensor.HasField("contents") for tensor in response.outputs)
    return f"{shapes}, {len(response.raw_output_contents)} raw, typed: {typed_too}"


def _parameters(response: pb.ModelInferResponse) -> str:
    return " ".join(sorted(response.parameters)) or "none"


def _goes_on(bad: pb.ModelInferRequest | bytes) -> Callable[[Peer], str]:
    def ask(peer: Peer) -> str:
        first = outcome(lambda: peer.send("ModelInfer", bad))
        return f"{first}, then {outcome(lambda: peer.send('ModelInfer', flat()), values)}"

    return ask


def _deadline_computing(peer: Peer) -> str:
    """A deadline that passes during the run, and the next call."""
    first = outcome(lambda: peer.send("ModelInfer", slow(400), timeout=0.03))
    return f"{first}, then {outcome(lambda: peer.send('ModelInfer', slow(1)), values)}"


def _behind(late: pb.ModelInferRequest, timeout: float = 30) -> Callable[[Peer], str]:
    """The outcome of a request behind a long one, and the number of its runs."""

    def ask(peer: Peer) -> str:
        before = peer.executions("slow")
        first = peer.infer(slow(600))
        time.sleep(_BEGUN)
        behind = outcome(lambda: peer.send("ModelInfer", late, timeout))
        status = outcome(first.result)
        outcome(lambda: peer.send("ModelInfer", slow(1)))
        return f"{behind}, the one before {status}, runs {peer.executions('slow') - before - 1}"

    return ask


def _cancelled(peer: Peer) -> str:
    """Calls that are cancelled in the queue and in their run: the number of runs, and the next call."""
    before = peer.executions("slow")
    working, *waiting = [peer.infer(slow(400)) for _ in range(4)]
    time.sleep(_BEGUN)
    for one in (*waiting, working):
        one.cancel()
    answer = outcome(lambda: peer.send("ModelInfer", slow(1)), values)
    return f"{answer}, runs of the cancelled at most 1: {peer.executions('slow') - before <= 2}"


def _full_queue(peer: Peer) -> str:
    first = peer.infer(slow(600))
    time.sleep(_BEGUN)
    others = [peer.infer(slow(1)) for _ in range(QUEUE_SIZE + 10)]
    statuses = {outcome(other.result) for other in others}
    return f"{' and '.join(sorted(statuses))}, the first {outcome(first.result)}"


def _by_priority(peer: Peer) -> str:
    """The order of the responses to waiting requests of three priorities."""
    first = peer.infer(slow(400))
    time.sleep(_BEGUN)
    done: list[str] = []
    calls = []
    for name, level in (("low", 10), ("default", 0), ("high", 1)):
        message = slow(20)
        message.parameters["priority"].uint64_param = level
        one = peer.infer(message)
        one.add_done_callback(lambda _, name=name: done.append(name))
        calls.append(one)
    for one in (first, *calls):
        outcome(one.result)
    return " ".join(done)


def _large(peer: Peer) -> str:
    return outcome(lambda: peer.send("ModelInfer", parameter("mine", string_param="x" * 2_000_000)))


def _concurrent(peer: Peer) -> str:
    calls = [peer.infer(flat(float(number), model="flat")) for number in range(30)]
    answers = [np.frombuffer(one.result().raw_output_contents[0], np.float32)[0] for one in calls]
    return str(answers == list(range(30)))


def _compressed(peer: Peer) -> str:
    call = peer.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    data = flat(*[1.0] * 1000).SerializeToString()
    return outcome(lambda: call(data, timeout=10, compression=grpc.Compression.Gzip))


INVALID = "INVALID_ARGUMENT"
_X = np.ones(1, np.float32)


def _invalid(name: str, message: pb.ModelInferRequest, text: str) -> Case:
    return Case(name, infer(message), INVALID, text=text)


def _stricter(name: str, message: pb.ModelInferRequest, reason: str, text: str) -> Case:
    return Case(name, infer(message), "OK", INVALID, reason, text)


def _set(message: pb.ModelInferRequest | None = None, **fields: Any) -> pb.ModelInferRequest:
    """A request with other fields in its first input."""
    message = message or flat()
    for name, value in fields.items():
        setattr(message.inputs[0], name, value)
    return message


def _of(version: str, model: str = "flat") -> pb.ModelInferRequest:
    return request(model, version=version, x=_X)


def _rows(real: int, whole: int, text: int) -> pb.ModelInferRequest:
    empty = np.full((text, 1), b"a", np.object_)
    return request("mixed", real=np.ones((real, 4), np.float32), whole=np.ones((whole, 2), np.int64), text=empty)


_ECHOED = "OK: real_out=[[1.5, 1.5, 1.5, 1.5]]; whole_out=[[7, 7]]; text_out=[[b'a']]"
CASES = [
    Case("a good raw request", infer(mixed(), values), _ECHOED),
    Case("a good typed request", infer(_typed_mixed(), values), _ECHOED),
    Case(
        "datatypes, shapes and one raw entry for each output",
        infer(mixed(2), _kinds),
        "OK: FP32[2, 4] INT64[2, 2] BYTES[2, 1], 3 raw, typed: False",
    ),
    Case("as many rows as allowed", infer(mixed(8), lambda r: list(r.outputs[0].shape)), "OK: [8, 4]"),
    Case("many at once", _concurrent, "True"),
    Case("compressed by gzip", _compressed, "OK"),
    Case(
        "id, name and version come back",
        infer(request("versioned", identity="a\n7", x=_X), _head),
        "OK: id='a\\n7' model=versioned version=3",
    ),
    Case("parameters of a plain response", infer(flat(), _parameters), "OK: none"),
    # Models and versions.
    Case("unknown model", infer(flat(model="zz")), "NOT_FOUND", text="model 'zz'"),
    Case("no model name", call("ModelInfer"), "NOT_FOUND", text="model ''"),
    Case("a model's name with a slash", infer(flat(model="../flat")), "NOT_FOUND", text="model '../flat'"),
    Case("a broken model", infer(flat(model="broken")), "NOT_FOUND"),
    Case("version 1", infer(_of("1", "versioned"), _head), "OK: id='' model=versioned version=1"),
    Case("version 2 of 1 and 3", infer(_of("2", "versioned")), "NOT_FOUND", text="1, 3"),
    _invalid("version abc", _of("abc"), "'abc'"),
    Case(
        "version 0",
        infer(_of("0")),
        "NOT_FOUND",
        INVALID,
        "Versions are positive, so this is no version at all.",
        "positive integer",
    ),
    Case("version 1.0", infer(_of("1.0")), "OK", INVALID, "Triton reads the 1 and ignores the rest.", "'1.0'"),
    _invalid("version of 5000 digits", _of("9" * 5000), "…"),
    _invalid("version of 30 digits", _of("9" * 30), "9" * 30),
    # Contents.
    _invalid(
        "raw and typed",
        _changed(lambda r: r.inputs[0].contents.fp32_contents.extend([1.0, 2.0]), flat()),
        "raw and typed",
    ),
    _invalid("neither raw nor typed", _changed(lambda r: r.ClearField("raw_input_contents"), flat()), "0 elements"),
    _invalid("raw too short", _raw(0, b"1234"), "got 4 raw bytes, expected 16 for FP32 [1, 4]"),
    _invalid("raw too long", _raw(0, b"1" * 17), "got 17 raw bytes, expected 16"),
    _invalid("raw empty", _raw(0, b""), "got 0 raw bytes, expected 16"),
    _invalid("typed too short", typed(flat(), 0, fp32_contents=[1.0]), "1 elements in fp32_contents, expected 2"),
    _invalid("typed too long", typed(flat(), 0, fp32_contents=[1.0, 2.0, 3.0]), "3 elements"),
    _invalid(
        "typed in the wrong field", typed(flat(), 0, int64_contents=[1, 2]), "'int64_contents', expected fp32_contents"
    ),
    _invalid(
        "typed in two fields", typed(flat(), 0, fp32_contents=[1.0, 2.0], int64_contents=[1, 2]), "'int64_contents'"
    ),
    _stricter(
        "more raw entries than inputs",
        _changed(lambda r: r.raw_input_contents.append(b"1"), flat()),
        "Triton ignores the surplus; a client that miscounts may have sent something else than it meant.",
        "got 2 entries, expected 1, one for each input",
    ),
    _invalid("fewer raw entries than inputs", _changed(lambda r: r.raw_input_contents.pop(), mixed()), "got 2 entries"),
    Case("NaN and infinity", infer(flat(float("nan"), float("inf")), values), "OK: x_out=[nan, inf]"),
    # BYTES.
    *(
        Case(f"BYTES: {name}", infer(mixed(text=text), lambda r: r.raw_output_contents[2][4:]), f"OK: {text!r}")
        for name, text in (("empty", b""), ("zeros", b"\0a\0"), ("UTF-8", "é".encode()))
    ),
    Case(
        "BYTES: no UTF-8",
        infer(mixed(text=b"\xff\xfe"), lambda r: r.raw_output_contents[2][4:]),
        r"OK: b'\xff\xfe'",
        INVALID,
        "The strings of ONNX are text.",
    ),
    Case("BYTES of 100 kB", infer(mixed(text=b"x" * 100_000), lambda r: len(r.raw_output_contents[2])), "OK: 100004"),
    _invalid(
        "BYTES without room for its length", _raw(2, b"\1"), "got 1 raw bytes, expected at least 4 for 1 elements"
    ),
    _invalid("BYTES whose length lies", _raw(2, b"\xff\xff\xff\xffa"), "hold 1 elements in 4294967299 bytes"),
    _invalid("BYTES shorter than its length", _raw(2, b"\5\0\0\0a"), "hold 1 elements in 9 bytes"),
    _invalid("BYTES longer than its length", _raw(2, b"\1\0\0\0ab"), "6 raw bytes that hold 1 elements in 5 bytes"),
    _invalid(
        "BYTES with one element too many", _raw(2, b"\1\0\0\0a\1\0\0\0b"), "10 raw bytes that hold 1 elements in 5"
    ),
    _invalid("BYTES with no element", _raw(2, b""), "got 0 raw bytes, expected at least 4"),
    # Inputs.
    _invalid("datatype FLOAT", _set(datatype="FLOAT"), "got 'FLOAT', expected FP32"),
    _invalid("datatype FP64", _set(datatype="FP64"), "got 'FP64', expected FP32"),
    _invalid("no datatype", _set(datatype=""), "got '', expected FP32"),
    _invalid("unknown input", _set(name="X"), "got 'X', expected one of ['x']"),
    _invalid("an input too much", request("flat", x=np.ones(2, np.float32), y=np.ones(2, np.float32)), "got 'y'"),
    _invalid("an input missing", _changed(_without_last, mixed()), "'text'"),
    _invalid("no input", pb.ModelInferRequest(model_name="flat"), "'x'"),
    _invalid("an input twice", _changed(_twice, mixed()), "input 'real': got it twice, expected it once"),
    Case(
        "inputs in another order",
        infer(_changed(lambda r: (r.inputs.reverse(), r.raw_input_contents.reverse()), mixed()), values),
        _ECHOED,
    ),
    _invalid("wrong shape", shaped(mixed(), 0, 2, 2), "got [2, 2], expected [-1, 4]"),
    _invalid("one dimension too many", shaped(mixed(), 0, 1, 1, 4), "got [1, 1, 4]"),
    _invalid("missing batch dimension", shaped(mixed(), 0, 4), "got [4], expected [-1, 4]"),
    _invalid("negative dimension", shaped(flat(), 0, -1), "got [-1]"),
    _invalid("no dimension", shaped(flat(), 0), "got []"),
    _stricter(
        "a dimension of 0, and no bytes",
        shaped(_raw(0, b"", flat()), 0, 0),
        "Neither TensorRT's profiles nor most models support empty tensors.",
        "got [0]",
    ),
    _invalid("0 rows", _rows(0, 0, 0), "got [0, 4]"),
    _invalid("dimensions that overflow 64 bits", shaped(mixed(), 0, 2**62, 4), str(2**62 * 16)),
    _stricter(
        "dimensions that overflow, BYTES",
        shaped(mixed(), 2, 2**62, 1),
        "The product overflows, and Triton's check with it.",
        f"at least {2**64} for {2**62} elements",
    ),
    _invalid("a row too many", mixed(9), "got 9 rows"),
    _invalid("inputs of different batches", _rows(2, 1, 1), "'real': 2"),
    Case(
        "more elements than the profile allows",
        infer(flat(*[1.0] * 5000), lambda r: list(r.outputs[0].shape)),
        "OK: [5000]",
        INVALID,
        "A bundle limits each dimension, and with it the memory of a request.",
        "got [5000]",
    ),
    # Outputs.
    Case("all outputs", infer(mixed(), _names), "OK: real_out whole_out text_out"),
    Case("one output", infer(_outputs("text_out"), _names), "OK: text_out"),
    Case(
        "outputs in the order of the request",
        infer(_outputs("text_out", "real_out"), _names),
        "OK: real_out text_out",
        "OK: text_out real_out",
        "The order of the request; Triton leaves it to the backend.",
    ),
    _invalid("unknown output", _outputs("zz"), "got 'zz', expected one of ['real_out', 'text_out', 'whole_out']"),
    Case(
        "an output twice",
        infer(_outputs("real_out", "real_out"), _names),
        "OK: real_out",
        INVALID,
        "Later versions of Triton refuse it too.",
        "output 'real_out': got it twice",
    ),
    Case(
        "classification",
        infer(_classified(), lambda r: r.outputs[0].datatype),
        "OK: BYTES",
        "UNIMPLEMENTED",
        "A client can rank the outputs.",
        "'classification'",
    ),
    # Parameters.
    *(
        Case(f"a parameter of the client's own: {kind}", infer(parameter("mine", **{kind: value})), "OK")
        for kind, value in (("bool_param", True), ("int64_param", -1), ("string_param", "é"), ("double_param", 0.5))
    ),
    Case(
        "a parameter of the client's own: uint64_param",
        infer(parameter("mine", uint64_param=2**64 - 1)),
        INVALID,
        "OK",
        "It is a kind of parameter like the others.",
    ),
    Case(
        "a parameter without a value",
        infer(parameter("mine")),
        INVALID,
        "OK",
        "It is the client's own, and has no meaning here.",
    ),
    Case(
        "triton_enable_empty_final_response",
        infer(parameter("triton_enable_empty_final_response", bool_param=True)),
        "OK",
    ),
    _invalid("another parameter triton_…", parameter("triton_zz", bool_param=True), "'triton_zz'"),
    Case("priority 1", infer(parameter("priority", mixed(), uint64_param=1)), "OK"),
    Case("priority 1 as int64", infer(parameter("priority", mixed(), int64_param=1)), "OK"),
    _stricter(
        "priority 99",
        parameter("priority", mixed(), uint64_param=99),
        "There are ten levels; Triton uses the default for one that does not exist.",
        "got 99, expected 1, the highest, to 10, or 0",
    ),
    _invalid("priority below 0", parameter("priority", mixed(), int64_param=-1), "got -1, expected 0 or more"),
    _invalid("priority as text", parameter("priority", mixed(), string_param="1"), "int64_param or uint64_param"),
    Case("timeout of a minute", infer(parameter("timeout", mixed(), int64_param=60_000_000)), "OK"),
    Case(
        "timeout of a minute as uint64",
        infer(parameter("timeout", mixed(), uint64_param=60_000_000)),
        INVALID,
        "OK",
        "The number matters, not its type.",
    ),
    _stricter(
        "timeout below 0",
        parameter("timeout", mixed(), int64_param=-1),
        "No client can mean it.",
        "got -1, expected 0 or more",
    ),
    _invalid("timeout as text", parameter("timeout", mixed(), string_param="1"), "int64_param or uint64_param"),
    _invalid("sequence_id to a model without state", parameter("sequence_id", uint64_param=7), "no model keeps state"),
    Case("sequence_id 0", infer(parameter("sequence_id", uint64_param=0)), INVALID, "OK", "0 means no sequence."),
    _invalid("sequence_start as a number", parameter("sequence_start", int64_param=1), "expected bool_param"),
    _stricter(
        "binary_data_output as a number",
        parameter("binary_data_output", int64_param=1),
        "It is a flag.",
        "expected bool_param",
    ),
    Case("headers as a bool", infer(parameter("headers", bool_param=True)), "OK"),
    # Failures, and the next request.
    Case(
        "a model that fails",
        _goes_on(request("failing", index=np.array([5], np.int64))),
        "INTERNAL, then OK: x_out=[1.5, 2.5]",
    ),
    Case("a message that is none", _goes_on(b"\xff\xff\xff"), "INTERNAL, then OK: x_out=[1.5, 2.5]"),
    Case("a message that ends early", _goes_on(flat().SerializeToString()[:-1]), "INTERNAL, then OK: x_out=[1.5, 2.5]"),
    Case("an empty message", _goes_on(b""), "NOT_FOUND, then OK: x_out=[1.5, 2.5]"),
    Case(
        "a message of 2 MB",
        _large,
        "OK",
        "RESOURCE_EXHAUSTED",
        "The server was started with a limit of 1 MB; Triton's is 2 GiB, more than a board has.",
    ),
    # Time.
    Case(
        "a deadline that passes while the model computes",
        _deadline_computing,
        "DEADLINE_EXCEEDED, then OK: steps_out=[[1]]",
    ),
    Case("a deadline that passes in the queue", _behind(slow(1), 0.05), "DEADLINE_EXCEEDED, the one before OK, runs 1"),
    Case(
        "timeout that passes in the queue",
        _behind(slow(1, timeout_us=20_000)),
        "UNAVAILABLE, the one before OK, runs 1",
        "DEADLINE_EXCEEDED, the one before OK, runs 1",
        "gRPC's status for a deadline; UNAVAILABLE would invite a retry.",
    ),
    Case(
        "timeout while the model computes",
        infer(slow(400, timeout_us=20_000)),
        "OK",
        "DEADLINE_EXCEEDED",
        "The time ran out; Triton checks it only in the queue.",
    ),
    Case("cancelled calls", _cancelled, "OK: steps_out=[[1]], runs of the cancelled at most 1: True"),
    Case(
        "a full queue",
        _full_queue,
        "OK and UNAVAILABLE, the first OK",
        "OK and RESOURCE_EXHAUSTED, the first OK",
        "gRPC's status for a limit.",
    ),
    Case("priorities", _by_priority, "high default low"),
]
