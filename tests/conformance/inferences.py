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
    parameter,
    request,
    shaped,
    slow,
    told,
    typed,
    values,
)

#: Seconds after which a request that was sent is being computed.
_BEGUN = 0.03
#: A good request to ``mixed`` typed throughout.
_CONTENTS: dict[int, dict[str, list[Any]]] = {
    0: {"fp32_contents": [1.5] * 4},
    1: {"int64_contents": [7, 7]},
    2: {"bytes_contents": [b"a"]},
}


def _typed_mixed(**others: list[Any]) -> pb.ModelInferRequest:
    message = mixed()
    for index, contents in _CONTENTS.items():
        typed(message, index, **contents)
    for name, items in others.items():
        getattr(message.inputs[0].contents, name).extend(items)
    return message


def _changed(change: Callable[[pb.ModelInferRequest], object], message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    change(message)
    return message


def _raw(index: int, data: bytes, message: pb.ModelInferRequest | None = None) -> pb.ModelInferRequest:
    return _changed(lambda r: r.raw_input_contents.__setitem__(index, data), message or mixed())


def _outputs(*names: str, message: pb.ModelInferRequest | None = None) -> pb.ModelInferRequest:
    return _changed(lambda r: [r.outputs.add(name=name) for name in names], message or mixed())


def _twice(index: int) -> pb.ModelInferRequest:
    message = mixed()
    message.inputs.append(message.inputs[index])
    message.raw_input_contents.append(message.raw_input_contents[index])
    return message


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
        first = told(lambda: peer.send("ModelInfer", bad))
        return f"{first}, then {told(lambda: peer.send('ModelInfer', flat()), values)}"

    return ask


def _deadline_computing(peer: Peer) -> str:
    """A deadline that passes while the model computes ends the call, and nobody after it suffers."""
    first = told(lambda: peer.send("ModelInfer", slow(400), timeout=0.03))
    return f"{first}, then {told(lambda: peer.send('ModelInfer', slow(1)), values)}"


def _behind(late: pb.ModelInferRequest, timeout: float = 30) -> Callable[[Peer], str]:
    """What becomes of a request behind one that takes long, and whether it was computed."""

    def ask(peer: Peer) -> str:
        before = peer.executions("slow")
        first = peer.infer(slow(600))
        time.sleep(_BEGUN)
        behind = told(lambda: peer.send("ModelInfer", late, timeout))
        status = told(first.result)
        told(lambda: peer.send("ModelInfer", slow(1)))
        return f"{behind}, the one before {status}, runs {peer.executions('slow') - before - 1}"

    return ask


def _cancelled(peer: Peer) -> str:
    """Calls that are cancelled in the queue and at work; how many runs that made, and whether the next is answered."""
    before = peer.executions("slow")
    working, *waiting = [peer.infer(slow(400)) for _ in range(4)]
    time.sleep(_BEGUN)
    for one in (*waiting, working):
        one.cancel()
    answer = told(lambda: peer.send("ModelInfer", slow(1)), values)
    return f"{answer}, runs of the cancelled at most 1: {peer.executions('slow') - before <= 2}"


def _full_queue(peer: Peer) -> str:
    first = peer.infer(slow(600))
    time.sleep(_BEGUN)
    others = [peer.infer(slow(1)) for _ in range(QUEUE_SIZE + 10)]
    statuses = {told(other.result) for other in others}
    return f"{' and '.join(sorted(statuses))}, the first {told(first.result)}"


def _by_priority(peer: Peer) -> str:
    """In which order requests of three priorities are answered that waited for a fourth."""
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
        told(one.result)
    return " ".join(done)


def _large(peer: Peer) -> str:
    return told(lambda: peer.send("ModelInfer", parameter("mine", string_param="x" * 2_000_000)))


def _concurrent(peer: Peer) -> str:
    calls = [peer.infer(flat(float(number), model="flat")) for number in range(30)]
    answers = [np.frombuffer(one.result().raw_output_contents[0], np.float32)[0] for one in calls]
    return str(answers == list(range(30)))


def _compressed(peer: Peer) -> str:
    call = peer.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    data = flat(*[1.0] * 1000).SerializeToString()
    return told(lambda: call(data, timeout=10, compression=grpc.Compression.Gzip))


CASES = [
    Case(
        "a good raw request",
        infer(mixed(), values),
        "OK: real_out=[[1.5, 1.5, 1.5, 1.5]]; whole_out=[[7, 7]]; text_out=[[b'a']]",
    ),
    Case(
        "a good typed request",
        infer(_typed_mixed(), values),
        "OK: real_out=[[1.5, 1.5, 1.5, 1.5]]; whole_out=[[7, 7]]; text_out=[[b'a']]",
    ),
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
        infer(request("versioned", identity="a\n7", x=np.ones(1, np.float32)), _head),
        "OK: id='a\\n7' model=versioned version=3",
    ),
    Case("parameters of a plain response", infer(flat(), _parameters), "OK: none"),
    # Models and versions.
    Case("unknown model", infer(flat(model="zz")), "NOT_FOUND"),
    Case("no model name", call("ModelInfer"), "NOT_FOUND"),
    Case("a model's name with a slash", infer(flat(model="../flat")), "NOT_FOUND"),
    Case("a broken model", infer(flat(model="broken")), "NOT_FOUND"),
    Case(
        "version 1",
        infer(request("versioned", version="1", x=np.ones(1, np.float32)), _head),
        "OK: id='' model=versioned version=1",
    ),
    Case("version 2 of 1 and 3", infer(request("versioned", version="2", x=np.ones(1, np.float32))), "NOT_FOUND"),
    Case("version abc", infer(request("flat", version="abc", x=np.ones(1, np.float32))), "INVALID_ARGUMENT"),
    Case(
        "version 0",
        infer(request("flat", version="0", x=np.ones(1, np.float32))),
        "NOT_FOUND",
        "INVALID_ARGUMENT",
        "Versions are positive, so this is no version at all.",
    ),
    Case(
        "version 1.0",
        infer(request("flat", version="1.0", x=np.ones(1, np.float32))),
        "OK",
        "INVALID_ARGUMENT",
        "Triton reads the 1 and leaves the rest.",
    ),
    Case(
        "version of 5000 digits",
        infer(request("flat", version="9" * 5000, x=np.ones(1, np.float32))),
        "INVALID_ARGUMENT",
    ),
    Case(
        "version of 30 digits", infer(request("flat", version="9" * 30, x=np.ones(1, np.float32))), "INVALID_ARGUMENT"
    ),
    # Contents.
    Case(
        "raw and typed",
        infer(_changed(lambda r: r.inputs[0].contents.fp32_contents.extend([1.0, 2.0]), flat())),
        "INVALID_ARGUMENT",
    ),
    Case(
        "neither raw nor typed",
        infer(_changed(lambda r: r.ClearField("raw_input_contents"), flat())),
        "INVALID_ARGUMENT",
    ),
    Case("raw too short", infer(_raw(0, b"1234")), "INVALID_ARGUMENT"),
    Case("raw too long", infer(_raw(0, b"1" * 17)), "INVALID_ARGUMENT"),
    Case("raw empty", infer(_raw(0, b"")), "INVALID_ARGUMENT"),
    Case("typed too short", infer(typed(flat(), 0, fp32_contents=[1.0])), "INVALID_ARGUMENT"),
    Case("typed too long", infer(typed(flat(), 0, fp32_contents=[1.0, 2.0, 3.0])), "INVALID_ARGUMENT"),
    Case("typed in the wrong field", infer(typed(flat(), 0, int64_contents=[1, 2])), "INVALID_ARGUMENT"),
    Case(
        "typed in two fields",
        infer(typed(flat(), 0, fp32_contents=[1.0, 2.0], int64_contents=[1, 2])),
        "INVALID_ARGUMENT",
    ),
    Case(
        "more raw entries than inputs",
        infer(_changed(lambda r: r.raw_input_contents.append(b"1"), flat())),
        "OK",
        "INVALID_ARGUMENT",
        "Triton leaves the surplus out; who counts wrong may have sent something else than meant.",
    ),
    Case(
        "fewer raw entries than inputs",
        infer(_changed(lambda r: r.raw_input_contents.pop(), mixed())),
        "INVALID_ARGUMENT",
    ),
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
        "INVALID_ARGUMENT",
        "The strings of ONNX are text.",
    ),
    Case("BYTES of 100 kB", infer(mixed(text=b"x" * 100_000), lambda r: len(r.raw_output_contents[2])), "OK: 100004"),
    Case("BYTES without room for its length", infer(_raw(2, b"\1")), "INVALID_ARGUMENT"),
    Case("BYTES whose length lies", infer(_raw(2, b"\xff\xff\xff\xffa")), "INVALID_ARGUMENT"),
    Case("BYTES shorter than its length", infer(_raw(2, b"\5\0\0\0a")), "INVALID_ARGUMENT"),
    Case("BYTES longer than its length", infer(_raw(2, b"\1\0\0\0ab")), "INVALID_ARGUMENT"),
    Case("BYTES with one element too many", infer(_raw(2, b"\1\0\0\0a\1\0\0\0b")), "INVALID_ARGUMENT"),
    Case("BYTES with no element", infer(_raw(2, b"")), "INVALID_ARGUMENT"),
    # Inputs.
    Case(
        "datatype FLOAT",
        infer(_changed(lambda r: setattr(r.inputs[0], "datatype", "FLOAT"), flat())),
        "INVALID_ARGUMENT",
    ),
    Case(
        "datatype FP64", infer(_changed(lambda r: setattr(r.inputs[0], "datatype", "FP64"), flat())), "INVALID_ARGUMENT"
    ),
    Case("no datatype", infer(_changed(lambda r: setattr(r.inputs[0], "datatype", ""), flat())), "INVALID_ARGUMENT"),
    Case("unknown input", infer(_changed(lambda r: setattr(r.inputs[0], "name", "X"), flat())), "INVALID_ARGUMENT"),
    Case(
        "an input too much",
        infer(request("flat", x=np.ones(2, np.float32), y=np.ones(2, np.float32))),
        "INVALID_ARGUMENT",
    ),
    Case(
        "an input missing",
        infer(_changed(lambda r: (r.inputs.pop(), r.raw_input_contents.pop()), mixed())),
        "INVALID_ARGUMENT",
    ),
    Case("no input", infer(pb.ModelInferRequest(model_name="flat")), "INVALID_ARGUMENT"),
    Case("an input twice", infer(_twice(0)), "INVALID_ARGUMENT"),
    Case(
        "inputs in another order",
        infer(
            request(
                "mixed",
                text=np.array([[b"a"]], np.object_),
                whole=np.ones((1, 2), np.int64),
                real=np.ones((1, 4), np.float32),
            ),
            values,
        ),
        "OK: real_out=[[1.0, 1.0, 1.0, 1.0]]; whole_out=[[1, 1]]; text_out=[[b'a']]",
    ),
    Case("wrong shape", infer(shaped(mixed(), 0, 2, 2)), "INVALID_ARGUMENT"),
    Case("one dimension too many", infer(shaped(mixed(), 0, 1, 1, 4)), "INVALID_ARGUMENT"),
    Case("missing batch dimension", infer(shaped(mixed(), 0, 4)), "INVALID_ARGUMENT"),
    Case("negative dimension", infer(shaped(flat(), 0, -1)), "INVALID_ARGUMENT"),
    Case("no dimension", infer(shaped(flat(), 0)), "INVALID_ARGUMENT"),
    Case(
        "a dimension of 0, and no bytes",
        infer(shaped(_raw(0, b"", flat()), 0, 0)),
        "OK",
        "INVALID_ARGUMENT",
        "Neither TensorRT's profiles nor most models know empty tensors.",
    ),
    Case(
        "0 rows",
        infer(
            request(
                "mixed",
                real=np.ones((0, 4), np.float32),
                whole=np.ones((0, 2), np.int64),
                text=np.empty((0, 1), np.object_),
            )
        ),
        "INVALID_ARGUMENT",
    ),
    Case("dimensions that overflow 64 bits", infer(shaped(mixed(), 0, 2**62, 4)), "INVALID_ARGUMENT"),
    Case(
        "dimensions that overflow, BYTES",
        infer(shaped(mixed(), 2, 2**62, 1)),
        "OK",
        "INVALID_ARGUMENT",
        "The product overflows, and Triton's check with it.",
    ),
    Case("a row too many", infer(mixed(9)), "INVALID_ARGUMENT"),
    Case(
        "inputs of different batches",
        infer(
            request(
                "mixed",
                real=np.ones((2, 4), np.float32),
                whole=np.ones((1, 2), np.int64),
                text=np.array([[b"a"]], np.object_),
            )
        ),
        "INVALID_ARGUMENT",
    ),
    Case(
        "more elements than the profile allows",
        infer(flat(*[1.0] * 5000), lambda r: list(r.outputs[0].shape)),
        "OK: [5000]",
        "INVALID_ARGUMENT",
        "A bundle bounds each dimension, which bounds the memory of a request.",
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
    Case("unknown output", infer(_outputs("zz")), "INVALID_ARGUMENT"),
    Case(
        "an output twice",
        infer(_outputs("real_out", "real_out"), _names),
        "OK: real_out",
        "INVALID_ARGUMENT",
        "Later versions of Triton refuse it too.",
    ),
    Case(
        "classification",
        infer(_classified(), lambda r: r.outputs[0].datatype),
        "OK: BYTES",
        "UNIMPLEMENTED",
        "A client can rank by itself.",
    ),
    # Parameters.
    *(
        Case(f"a parameter of the client's own: {kind}", infer(parameter("mine", **{kind: value})), "OK")
        for kind, value in (
            ("bool_param", True),
            ("int64_param", -1),
            ("string_param", "é"),
            ("double_param", 0.5),
        )
    ),
    Case(
        "a parameter of the client's own: uint64_param",
        infer(parameter("mine", uint64_param=2**64 - 1)),
        "INVALID_ARGUMENT",
        "OK",
        "It is a kind of parameter like the others.",
    ),
    Case(
        "a parameter without a value",
        infer(parameter("mine")),
        "INVALID_ARGUMENT",
        "OK",
        "It is the client's own, and means nothing here.",
    ),
    Case(
        "triton_enable_empty_final_response",
        infer(parameter("triton_enable_empty_final_response", bool_param=True)),
        "OK",
    ),
    Case("another parameter triton_…", infer(parameter("triton_zz", bool_param=True)), "INVALID_ARGUMENT"),
    Case("priority 1", infer(parameter("priority", mixed(), uint64_param=1)), "OK"),
    Case("priority 1 as int64", infer(parameter("priority", mixed(), int64_param=1)), "OK"),
    Case(
        "priority 99",
        infer(parameter("priority", mixed(), uint64_param=99)),
        "OK",
        "INVALID_ARGUMENT",
        "There are ten levels; Triton takes one that does not exist for the default.",
    ),
    Case("priority below 0", infer(parameter("priority", mixed(), int64_param=-1)), "INVALID_ARGUMENT"),
    Case("priority as text", infer(parameter("priority", mixed(), string_param="1")), "INVALID_ARGUMENT"),
    Case("timeout of a minute", infer(parameter("timeout", mixed(), int64_param=60_000_000)), "OK"),
    Case(
        "timeout of a minute as uint64",
        infer(parameter("timeout", mixed(), uint64_param=60_000_000)),
        "INVALID_ARGUMENT",
        "OK",
        "It is what the number means that matters.",
    ),
    Case(
        "timeout below 0",
        infer(parameter("timeout", mixed(), int64_param=-1)),
        "OK",
        "INVALID_ARGUMENT",
        "It cannot be meant.",
    ),
    Case("timeout as text", infer(parameter("timeout", mixed(), string_param="1")), "INVALID_ARGUMENT"),
    Case("sequence_id to a model without state", infer(parameter("sequence_id", uint64_param=7)), "INVALID_ARGUMENT"),
    Case(
        "sequence_id 0",
        infer(parameter("sequence_id", uint64_param=0)),
        "INVALID_ARGUMENT",
        "OK",
        "0 means no sequence.",
    ),
    Case("sequence_start as a number", infer(parameter("sequence_start", int64_param=1)), "INVALID_ARGUMENT"),
    Case(
        "binary_data_output as a number",
        infer(parameter("binary_data_output", int64_param=1)),
        "OK",
        "INVALID_ARGUMENT",
        "A flag has to be one.",
    ),
    Case("headers as a bool", infer(parameter("headers", bool_param=True)), "OK"),
    # What goes wrong, and the request after it.
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
        "The server was started with a limit of 1 MB; Triton's is 2 GiB, more than a board has to give.",
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
        "gRPC's word for time that ran out; UNAVAILABLE would ask for another attempt.",
    ),
    Case(
        "timeout while the model computes",
        infer(slow(400, timeout_us=20_000)),
        "OK",
        "DEADLINE_EXCEEDED",
        "The time ran out; Triton looks only while a request waits.",
    ),
    Case("cancelled calls", _cancelled, "OK: steps_out=[[1]], runs of the cancelled at most 1: True"),
    Case(
        "a full queue",
        _full_queue,
        "OK and UNAVAILABLE, the first OK",
        "OK and RESOURCE_EXHAUSTED, the first OK",
        "gRPC's word for a limit that was reached.",
    ),
    Case("priorities", _by_priority, "high default low"),
]
