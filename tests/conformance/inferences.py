"""Cases about single inferences: models, versions, inputs, outputs, parameters, time."""

import time

import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.models import QUEUE_SIZE
from tests.conformance.peer import (
    Case,
    call,
    flat,
    infer,
    invalid,
    mixed,
    outcome,
    parameter,
    slow,
    steps,
    typed,
    values,
)
from tests.support.sample_requests import raw_request, reshaped

#: Seconds until a request is in its run.
_BEGUN = 0.03


def _changed(change, message):
    change(message)
    return message


def _typed_mixed():
    message = typed(mixed(), 0, fp32_contents=[1.5] * 4)
    return typed(typed(message, 1, int64_contents=[7, 7]), 2, bytes_contents=[b"a"])


def _raw(index, data, message=None):
    return _changed(lambda r: r.raw_input_contents.__setitem__(index, data), message or mixed())


def _outputs(*names):
    return _changed(lambda r: [r.outputs.add(name=name) for name in names], mixed())


def _of(version, model="flat", identity=""):
    return raw_request(model, version=version, identity=identity, x=np.ones(1, np.float32))


def _set(**fields):
    message = flat()
    for name, value in fields.items():
        setattr(message.inputs[0], name, value)
    return message


def _unequal():
    text = np.array([[b"a"]], np.object_)
    return raw_request("mixed", real=np.ones((2, 4), np.float32), whole=np.ones((1, 2), np.int64), text=text)


def _head(response):
    return f"id={response.id!r} model={response.model_name} version={response.model_version}"


def _names(response):
    return " ".join(tensor.name for tensor in response.outputs)


def _text(response):
    return response.raw_output_contents[2][4:]


def _shape(response):
    return list(response.outputs[0].shape)


def _behind(late, timeout=30):
    """The outcome of a request behind a long one, and the number of its runs."""

    def ask(peer):
        before = peer.executions("slow")
        first = peer.infer(slow(1500))  # long enough for a busy machine to send the next in time
        time.sleep(_BEGUN)
        behind = outcome(lambda: peer.send("ModelInfer", late, timeout))
        status = outcome(first.result)
        outcome(lambda: peer.send("ModelInfer", slow(1)))
        return f"{behind}, the one before {status}, runs {peer.executions('slow') - before - 1}"

    return ask


def _cancelled(peer):
    """Calls that are cancelled in the queue and in their run: the number of runs, and the next call."""
    outcome(lambda: peer.send("ModelInfer", slow(600)))  # after a long run, a worker computes, and not the event loop
    before = peer.executions("slow")
    working, *waiting = [peer.infer(slow(1500)) for _ in range(4)]  # long enough for a busy machine to cancel in time
    time.sleep(_BEGUN)
    for one in (*waiting, working):
        one.cancel()
    answer = outcome(lambda: peer.send("ModelInfer", slow(1)), values)
    return f"{answer}, runs of the cancelled at most 1: {peer.executions('slow') - before <= 2}"


def _full_queue(peer):
    first = peer.infer(slow(600))
    time.sleep(_BEGUN)
    statuses = {outcome(other.result) for other in [peer.infer(slow(1)) for _ in range(QUEUE_SIZE + 10)]}
    return f"{' and '.join(sorted(statuses))}, the first {outcome(first.result)}"


def _by_priority(peer):
    """The order of the responses to waiting requests of three priorities."""
    calls = [peer.infer(slow(400))]
    time.sleep(_BEGUN)
    done = []
    for name, level in (("low", 10), ("default", 0), ("high", 1)):
        calls.append(peer.infer(parameter("priority", slow(20), uint64_param=level)))
        calls[-1].add_done_callback(lambda _, name=name: done.append(name))
    for one in calls:
        outcome(one.result)
    return " ".join(done)


_ECHOED = "OK: real_out=[[1.5, 1.5, 1.5, 1.5]]; whole_out=[[7, 7]]; text_out=[[b'a']]"
_CLASSIFIED = _changed(
    lambda r: r.outputs.add(name="real_out").parameters["classification"].MergeFrom(pb.InferParameter(int64_param=1)),
    mixed(),
)
_REVERSED = _changed(lambda r: [r.inputs.reverse(), r.raw_input_contents.reverse()], mixed())
_SURPLUS = _changed(lambda r: r.raw_input_contents.append(b""), flat())
_BEYOND = raw_request("failing", index=np.array([5]))
_GOES_ON, _GONE_ON = infer(flat(), values), "OK: x_out=[1.5, 2.5]"
_LATE = steps(call("ModelInfer", slow(400), timeout=0.03), infer(slow(1), values))
CASES = [
    Case("a good raw request", infer(mixed(), values), _ECHOED),
    Case("a good typed request", infer(_typed_mixed(), values), _ECHOED),
    Case("as many rows as allowed", infer(mixed(8), _shape), "OK: [8, 4]"),
    # Models and versions.
    Case("unknown model", infer(flat(model="zz")), "NOT_FOUND", "model 'zz'"),
    Case("an empty message", steps(infer(b""), _GOES_ON), f"NOT_FOUND, {_GONE_ON}", "model ''"),
    Case("a broken model", infer(flat(model="broken")), "NOT_FOUND"),
    Case("no version", infer(_of("", "versioned", "a\n7"), _head), "OK: id='a\\n7' model=versioned version=3"),
    Case("version 1", infer(_of("1", "versioned"), _head), "OK: id='' model=versioned version=1"),
    Case("version 2 of 1 and 3", infer(_of("2", "versioned")), "NOT_FOUND", "1, 3"),
    invalid("version abc", _of("abc"), "'abc'"),
    Case("version 0", infer(_of("0")), text="positive integer"),
    Case("version 1.0", infer(_of("1.0")), text="'1.0'"),
    invalid("version of 5000 digits", _of("9" * 5000), "expected at most 1024"),
    # Contents.
    invalid("raw and typed", _changed(lambda r: r.inputs[0].contents.fp32_contents.append(1), flat()), "raw and typed"),
    invalid("neither raw nor typed", _changed(lambda r: r.ClearField("raw_input_contents"), flat()), "0 elements"),
    invalid("raw too short", _raw(0, b"1234"), "got 4 raw bytes, expected 16 for FP32 [1, 4]"),
    invalid("raw too long", _raw(0, b"1" * 17), "got 17 raw bytes, expected 16"),
    invalid("typed too long", typed(flat(), 0, fp32_contents=[1.0] * 3), "3 elements in fp32_contents, expected 2"),
    invalid("typed in the wrong field", typed(flat(), 0, int64_contents=[1, 2]), "'int64_contents', expected fp32"),
    Case("more raw entries than inputs", infer(_SURPLUS), text="got 2 entries, expected 1"),
    invalid("fewer raw entries than inputs", _changed(lambda r: r.raw_input_contents.pop(), mixed()), "got 2 entries"),
    Case("NaN and infinity", infer(flat(float("nan"), float("inf")), values), "OK: x_out=[nan, inf]"),
    # BYTES.
    Case("BYTES: empty", infer(mixed(text=b""), _text), "OK: b''"),
    Case("BYTES: zeros and UTF-8", infer(mixed(text="\0é\0".encode()), _text), r"OK: b'\x00\xc3\xa9\x00'"),
    Case("BYTES: no UTF-8", infer(mixed(text=b"\xff\xfe"), _text)),
    invalid("BYTES without its length", _raw(2, b"\1"), "got 1 raw bytes, expected at least 4 for 1 elements"),
    invalid("BYTES shorter than its length", _raw(2, b"\xff\xff\xff\xffa"), "hold 1 elements in 4294967299 bytes"),
    invalid("BYTES longer than its length", _raw(2, b"\1\0\0\0ab"), "6 raw bytes that hold 1 elements in 5 bytes"),
    # Inputs.
    invalid("datatype FLOAT", _set(datatype="FLOAT"), "got 'FLOAT', expected FP32"),
    invalid("unknown input", _set(name="X"), "got 'X', expected one of ['x']"),
    invalid("an input missing", pb.ModelInferRequest(model_name="flat"), "'x'"),
    invalid(
        "an input twice", _changed(lambda r: r.MergeFrom(mixed()), mixed()), "input 'real': expected each name once"
    ),
    Case("inputs in another order", infer(_REVERSED, values), _ECHOED),
    invalid("wrong shape", reshaped(mixed(), 2, 2), "got [2, 2], expected [-1, 4]"),
    invalid("one dimension too many", reshaped(mixed(), 1, 1, 4), "got [1, 1, 4]"),
    invalid("negative dimension", reshaped(flat(), -1), "got [-1]"),
    invalid("no dimension", reshaped(flat()), "got []"),
    Case("a dimension of 0, and no bytes", infer(reshaped(_raw(0, b"", flat()), 0)), text="got [0]"),
    invalid("dimensions that overflow 64 bits", reshaped(mixed(), 2**62, 4), str(2**62 * 16)),
    Case(
        "dimensions that overflow, BYTES",
        infer(reshaped(mixed(), 2**62, 1, index=2)),
        text=f"at least {2**64} for {2**62}",
    ),
    invalid("a row too many", mixed(9), "got 9 rows"),
    invalid("inputs of different batches", _unequal(), "'real': 2"),
    Case("more elements than the profile allows", infer(flat(*[1.0] * 5000), _shape), text="got [5000]"),
    # Outputs.
    Case("one output", infer(_outputs("text_out"), _names), "OK: text_out"),
    Case("outputs in the order of the request", infer(_outputs("text_out", "real_out"), _names)),
    invalid("unknown output", _outputs("zz"), "got 'zz', expected one of ['real_out', 'text_out', 'whole_out']"),
    Case("an output twice", infer(_outputs("real_out", "real_out"), _names), text="'real_out': expected each name"),
    Case("classification", infer(_CLASSIFIED, lambda r: r.outputs[0].datatype), "OK: BYTES"),
    # Parameters.
    Case("a parameter of the client's own", infer(parameter("mine", string_param="é")), "OK"),
    Case("a parameter of the client's own: uint64_param", infer(parameter("mine", uint64_param=2**64 - 1))),
    Case("a parameter without a value", infer(parameter("mine"))),
    Case("final response wanted", infer(parameter("triton_enable_empty_final_response", bool_param=True)), "OK"),
    invalid("another parameter triton_…", parameter("triton_zz", bool_param=True), "'triton_zz'"),
    Case("priority 1 as int64", infer(parameter("priority", mixed(), int64_param=1)), "OK"),
    Case("priority 99", infer(parameter("priority", mixed(), uint64_param=99)), text="got 99, expected 1, the highest"),
    invalid("priority below 0", parameter("priority", mixed(), int64_param=-1), "got -1, expected 0 or more"),
    invalid("timeout as text", parameter("timeout", mixed(), string_param="1"), "int64_param or uint64_param"),
    Case("timeout of a minute as uint64", infer(parameter("timeout", mixed(), uint64_param=60_000_000))),
    Case("timeout below 0", infer(parameter("timeout", mixed(), int64_param=-1)), text="got -1, expected 0 or more"),
    invalid("sequence_id to a model without state", parameter("sequence_id", uint64_param=7), "no model keeps state"),
    Case("sequence_id 0", infer(parameter("sequence_id", uint64_param=0))),
    Case("binary_data_output as a number", infer(parameter("binary_data_output", int64_param=1)), text="bool_param"),
    # Failures, and the next request.
    Case("a model that fails", steps(infer(_BEYOND), _GOES_ON), f"INTERNAL, {_GONE_ON}"),
    Case("a message that is none", steps(infer(b"\xff\xff\xff"), _GOES_ON), f"INTERNAL, {_GONE_ON}"),
    Case("a message of 2 MB", infer(parameter("mine", string_param="x" * 2_000_000))),
    # Time.
    Case("a deadline that passes while the model computes", _LATE, "DEADLINE_EXCEEDED, OK: steps_out=[[1]]"),
    Case("a deadline that passes in the queue", _behind(slow(1), 0.05), "DEADLINE_EXCEEDED, the one before OK, runs 1"),
    Case("timeout that passes in the queue", _behind(parameter("timeout", slow(1), int64_param=20_000))),
    Case("timeout while the model computes", infer(parameter("timeout", slow(400), int64_param=20_000))),
    Case("cancelled calls", _cancelled, "OK: steps_out=[[1]], runs of the cancelled at most 1: True"),
    Case("a full queue", _full_queue),
    Case("priorities", _by_priority, "high default low"),
]
