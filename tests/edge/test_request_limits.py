"""Limits of a request's own parts: what is refused before a parser, a name or a parameter costs anything."""

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import InvalidRequest
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE
from edge.serving.request import SMALL_BYTES, check_message
from edge.settings import TRANSPORTS
from tests.support.in_process import running_service, serving_here
from tests.support.sample_requests import changed, good

MOST_PARTS, MOST_NUMBERS = 16 * 1024, 8 * 2**20


def with_inputs(count):
    request = pb.ModelInferRequest()
    for _ in range(count):
        request.inputs.add()
    return request


def with_texts(count, size=0):
    request = pb.ModelInferRequest()
    request.inputs.add(name="n").contents.bytes_contents.extend([b"t" * size] * count)
    return request


def with_dimensions(count):
    request = pb.ModelInferRequest()
    request.inputs.add().shape.extend([1] * count)
    return request


def with_contents(**values):
    request = pb.ModelInferRequest()
    request.inputs.add(contents=pb.InferTensorContents(**values))
    return request


def raw_contents(count):
    return pb.ModelInferRequest(raw_input_contents=[b""] * count)


FIELDS = "request message: got more than 16384 fields, expected at most 16384. Send fewer of them at once, and large"


@pytest.mark.parametrize(
    ("most", "more", "message"),
    [
        (lambda: with_inputs(MOST_PARTS), lambda: with_inputs(MOST_PARTS + 1), FIELDS),
        (lambda: raw_contents(MOST_PARTS), lambda: raw_contents(MOST_PARTS + 1), FIELDS),
        # The input, its name and its contents are parts, too; so are the input and the one field of its dimensions.
        (lambda: with_texts(MOST_PARTS - 3), lambda: with_texts(MOST_PARTS - 2), FIELDS),
        (lambda: with_texts(MOST_PARTS - 3, 200), lambda: with_texts(MOST_PARTS - 2, 200), FIELDS),
        (lambda: with_dimensions(MOST_PARTS - 2), lambda: with_dimensions(MOST_PARTS - 1), FIELDS),
        (
            lambda: with_contents(int64_contents=[1] * MOST_NUMBERS),
            lambda: with_contents(int64_contents=[1] * (MOST_NUMBERS + 1)),
            "request message: got more than 8388608 typed numbers, expected at most 8388608. Send fewer",
        ),
        (
            lambda: with_contents(bool_contents=[True] * MOST_NUMBERS),
            lambda: with_contents(bool_contents=[True] * MOST_NUMBERS, uint_contents=[2**32 - 1] * SMALL_BYTES),
            "typed numbers",
        ),
    ],
    ids=["inputs", "raw contents", "texts", "long texts", "dimensions", "integers", "integers of two fields"],
)
def test_parts_of_a_message_are_limited(most, more, message):
    check_message(most().SerializeToString())
    with pytest.raises(InvalidRequest) as caught:
        check_message(more().SerializeToString())
    assert message in str(caught.value)


def test_nothing_hides_the_parts_behind_it():
    inputs = with_inputs(MOST_PARTS + 1).SerializeToString()
    group = bytes([15 << 3 | 3, 15 << 3 | 4])
    numbers = bytes([15 << 3 | 1]) + bytes(8) + bytes([15 << 3 | 5]) + bytes(4) + bytes([15 << 3]) + b"\xff" * 9 + b"\1"
    long_tag = b"\xfa\xff\xff\xff\x0f\0"
    for before in (group, numbers, long_tag, good().SerializeToString()):
        assert pb.ModelInferRequest.FromString(before + with_inputs(2).SerializeToString())
        with pytest.raises(InvalidRequest, match="fields"):
            check_message(before + inputs)


@given(st.binary(max_size=200), st.integers(0, 200))
@settings(deadline=None, max_examples=300)
def test_what_is_no_message_is_left_to_the_parser(data, cut):
    check_message(data)
    check_message(good().SerializeToString()[:cut] + data)


LONG = "x" * 1025
NAMES = [
    (lambda r: setattr(r, "id", LONG), "id of the request: got 1025 characters, expected at most 1024. Send a shorter"),
    (
        lambda r: setattr(r, "model_name", LONG),
        "model_name: got 1025 characters, expected at most 1024. Send a shorter",
    ),
    (lambda r: setattr(r, "model_version", LONG), "model_version: got 1025 characters, expected at most 1024. Send"),
    (lambda r: setattr(r.inputs[0], "name", LONG), "input name: got 1025 characters, expected at most 1024. Send"),
    (
        lambda r: r.outputs.add(name=LONG),
        "output name: got 1025 characters, expected at most 1024. Send a shorter one.",
    ),
    (lambda r: r.parameters[LONG], "parameter name: got 1025 characters, expected at most 1024. Send a shorter one."),
    (
        lambda r: r.parameters["head"].MergeFrom(pb.InferParameter(string_param=LONG)),
        "parameter 'head': got 1025 characters, expected at most 1024. Send a shorter one.",
    ),
    (
        lambda r: [r.parameters[f"own {number}"] for number in range(65)],
        "parameters of the request: got 65, expected at most 64. Send those that the server reads, and no others.",
    ),
    (
        lambda r: [r.inputs[0].parameters[f"own {number}"] for number in range(65)],
        "parameters of input 'x': got 65, expected at most 64. Send those",
    ),
    (
        lambda r: [r.outputs.add(name="value")] + [r.outputs[0].parameters[f"own {number}"] for number in range(65)],
        "parameters of output 'value': got 65, expected at most 64. Send those",
    ),
    (
        lambda r: r.parameters["stop"].MergeFrom(pb.InferParameter(string_param="x" * 12_305)),
        "parameter 'stop': got 12305 characters, expected 4 texts of up to 256 characters. Give fewer",
    ),
]


async def test_names_and_numbers_are_limited(tmp_path):
    async with running_service(tmp_path) as running:
        for change, message in NAMES:
            with pytest.raises(InvalidRequest) as caught:
                await running.infer(changed(change))
            assert message in str(caught.value)
        longest = changed(lambda r: setattr(r, "id", LONG[1:]))
        for number in range(64):
            longest.parameters[f"own {number}"].bool_param = True
        assert (await running.infer(longest)).id == LONG[1:]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_refused_messages_have_the_status_of_other_bad_requests(tmp_path, transport):
    async with serving_here(tmp_path, transport) as channel:
        data = with_texts(MOST_PARTS, 4).SerializeToString()
        for call in (
            channel.unary_unary(f"/{INFERENCE}/ModelInfer")(data, timeout=10),
            channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")(iter([data]), timeout=10),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert FIELDS in str(caught.value.details())
