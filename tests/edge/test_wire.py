"""Tensors to bytes and back, as Triton's own clients write them, and the limits of a request's own parts."""

import re
import struct
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from edge.datatypes import NUMPY_TYPES, TensorSpec, byte_size, datatype_of
from edge.errors import InvalidRequest, Unsupported
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE
from edge.serving.call import MESSAGE, InferResponse
from edge.serving.request import SMALL_BYTES, RequestedOutput, check_message, request_of
from edge.serving.wire import CONTENTS_FIELDS, from_raw, requested_outputs, sent_inputs, to_raw
from edge.settings import TRANSPORTS
from tests.support.in_process import running_service, serving_here
from tests.support.sample_requests import changed, good

NUMERIC = tuple(name for name in NUMPY_TYPES if name != "BYTES")
SHAPES = arrays.array_shapes(max_dims=4, max_side=4)
#: Elements that a careless conversion would change: empty, with NUL at the end, no UTF-8.
HARD_BYTES = (b"", b"\0", b"a\0", b"\0a\0\0", "größer ≤ 漢".encode(), b"\xff\xfe", b"x" * 1000)


def numeric_arrays(datatype):
    return arrays.arrays(NUMPY_TYPES[datatype], SHAPES)


def bytes_array(elements, shape):
    array = np.empty(len(elements), np.object_)
    for index, element in enumerate(elements):
        array[index] = element
    return array.reshape(shape)


@st.composite
def bytes_arrays(draw):
    shape = draw(SHAPES)
    count = int(np.prod(shape))
    element = st.binary(max_size=20) | st.sampled_from(HARD_BYTES)
    return bytes_array(draw(st.lists(element, min_size=count, max_size=count)), shape)


ARRAYS = st.one_of([*(numeric_arrays(name) for name in NUMERIC), bytes_arrays()])


def same(one, other):
    """Equality of bits, NaN payloads and the sign of zero included."""
    if one.dtype.kind == "O":
        return one.shape == other.shape and one.tolist() == other.tolist()
    return one.shape == other.shape and one.tobytes() == np.ascontiguousarray(other, one.dtype).tobytes()


def spec_of(array, name="t"):
    return TensorSpec(name, datatype_of(array), (-1,) * array.ndim)


def typed_request(datatype, *shape, data):
    request = pb.ModelInferRequest()
    tensor = request.inputs.add(name="t", datatype=datatype, shape=shape)
    getattr(tensor.contents, CONTENTS_FIELDS[datatype]).extend(data)
    return request


def decoded(request, *specs):
    parsed = pb.ModelInferRequest.FromString(request.SerializeToString())
    sent = sent_inputs(request_of(parsed).inputs, parsed.raw_input_contents, {spec.name: spec for spec in specs})
    return {name: tensor.decode() for name, tensor in sent.items()}


@given(st.one_of([*(numeric_arrays(name) for name in NUMERIC if name != "FP16"), bytes_arrays()]))
@settings(deadline=None, max_examples=100)
def test_typed_round_trip(array):
    back = decoded(typed_request(datatype_of(array), *array.shape, data=array.ravel().tolist()), spec_of(array))["t"]
    assert back.dtype == array.dtype
    # A NaN travels as a Python float, which need not keep its payload.
    assert same(back, array) or np.array_equal(back, array, equal_nan=True)


@given(st.lists(ARRAYS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_raw_round_trip_of_named_inputs(values):
    request = pb.ModelInferRequest()
    for index, value in enumerate(values):
        request.inputs.add(name=f"t{index}", datatype=datatype_of(value), shape=value.shape)
        request.raw_input_contents.append(to_raw(value, datatype_of(value)))
    got = decoded(request, *(spec_of(value, f"t{index}") for index, value in enumerate(values)))
    assert list(got) == [f"t{index}" for index in range(len(values))]
    assert all(same(got[f"t{index}"], value) for index, value in enumerate(values))


# BOOL is left out: flags are normalised, which makes new ones.
@pytest.mark.parametrize("datatype", [name for name in NUMERIC if name != "BOOL"])
def test_raw_numbers_are_not_copied(datatype):
    data = bytes(byte_size(datatype, (3, 4)))
    array = from_raw(data, datatype, (3, 4), "t")
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert not array.flags.writeable


def test_every_byte_but_0_is_true():
    array = from_raw(bytes(range(256)), "BOOL", (256,), "t")
    assert (array.dtype, array.view(np.uint8).tolist()) == (np.bool_, [0, *[1] * 255])


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_any_layout_is_sent_row_major_and_little_endian(datatype):
    texts = bytes_array([str(number).encode() for number in range(12)], (3, 4))
    array = texts if datatype == "BYTES" else np.arange(12).astype(NUMPY_TYPES[datatype]).reshape(3, 4)
    big = array.astype(array.dtype.newbyteorder(">"))
    assert datatype_of(big) == datatype
    for view in (array.T, array[::-1], array[:, ::2], np.asfortranarray(array), big):
        assert same(from_raw(to_raw(view, datatype), datatype, view.shape, "t"), view.astype(array.dtype))


@pytest.mark.parametrize("datatype", ["INT8", "UINT8", "INT16", "UINT16"])
def test_typed_integers_outside_their_datatype_are_refused(datatype):
    limits, spec = np.iinfo(NUMPY_TYPES[datatype]), TensorSpec("t", datatype, (-1,))
    inside = [limits.min, limits.max]
    assert decoded(typed_request(datatype, 2, data=inside), spec)["t"].tolist() == inside
    # The field of unsigned integers holds no -1.
    for value in {limits.min - 1, limits.max + 1} - {-1}:
        with pytest.raises(InvalidRequest, match=f"got {value}, expected {datatype} values from {limits.min}"):
            decoded(typed_request(datatype, 2, data=[value, 2**31 - 1]), spec)


@pytest.mark.parametrize("datatype", ["INT8", "INT64", "FP32", "BOOL"])
def test_long_typed_contents_are_read_in_parts(datatype):
    spec, values = TensorSpec("t", datatype, (-1,)), np.arange(40_000) % 100
    array = values.astype(NUMPY_TYPES[datatype])
    data = array.tolist()
    assert same(decoded(typed_request(datatype, 40_000, data=data), spec)["t"], array)
    if datatype == "INT8":
        with pytest.raises(InvalidRequest, match="got 128, expected INT8 values"):
            decoded(typed_request(datatype, 40_000, data=[*data[:20_000], 128, *data[20_001:]]), spec)


def test_fp16_travels_raw_only():
    request = pb.ModelInferRequest()
    request.inputs.add(name="t", datatype="FP16", shape=[1]).contents.fp32_contents.append(1)
    with pytest.raises(InvalidRequest, match="got typed FP16, expected raw contents"):
        decoded(request, TensorSpec("t", "FP16", (-1,)))


@given(st.sampled_from(NUMERIC), SHAPES, st.integers(-64, 64).filter(bool))
def test_raw_numbers_of_another_size_are_refused(datatype, shape, surplus):
    wanted = byte_size(datatype, shape)
    with pytest.raises(InvalidRequest, match=f"expected {wanted} for {datatype}"):
        from_raw(bytes(max(wanted + surplus, 0)), datatype, shape, "t")


@given(bytes_arrays(), st.data())
def test_raw_bytes_that_are_cut_or_longer_are_refused(array, data):
    raw = to_raw(array, "BYTES")
    cut = data.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:cut], raw + b"\0", raw + struct.pack("<I", 0)):
        with pytest.raises(InvalidRequest):
            from_raw(wrong, "BYTES", array.shape, "t")


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
@given(st.binary(max_size=64), st.lists(st.integers(1, 2**62), max_size=8))
@example(b"12345678", [2**62, 2**62])  # more elements than a computer holds
@settings(deadline=None, max_examples=20)
def test_any_bytes_are_a_tensor_or_refused(datatype, data, shape):
    try:
        array = from_raw(data, datatype, tuple(shape), "t")
    except InvalidRequest:
        return
    assert array.shape == tuple(shape)
    assert datatype == "BOOL" or to_raw(array, datatype) == data


@given(st.lists(ARRAYS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_outputs_have_one_raw_entry_each(values, random):
    outputs = {f"o{index}": value for index, value in enumerate([*values, np.empty((0, 3)), np.empty(0, np.object_)])}
    names = random.sample(list(outputs), random.randint(1, len(outputs)))
    model = SimpleNamespace(name="m", version="1")
    response = MESSAGE.encode(InferResponse(model, "", {name: outputs[name] for name in names}, {}, dict))
    assert ([tensor.name for tensor in response.outputs], len(response.raw_output_contents)) == (names, len(names))
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        assert not tensor.HasField("contents")
        assert same(from_raw(raw, tensor.datatype, tuple(tensor.shape), "t"), outputs[tensor.name])


def test_outputs_are_all_or_the_requested_ones():
    specs = {name: TensorSpec(name, "FP32", (-1,)) for name in ("a", "b", "c")}
    assert requested_outputs([], specs) == ["a", "b", "c"]
    request = [RequestedOutput(name, {}) for name in "cad"]
    assert requested_outputs(request[:2], specs) == ["c", "a"]
    with pytest.raises(InvalidRequest, match=r"got 'd', expected one of \['a', 'b', 'c'\]"):
        requested_outputs(request, specs)


def test_shared_memory_is_not_allowed_by_default():
    request = pb.ModelInferRequest(inputs=[{"name": "t", "datatype": "FP32", "shape": [1]}])
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    with pytest.raises(Unsupported, match="inputs: got shared memory"):
        decoded(request, TensorSpec("t", "FP32", (-1,)))


@given(bytes_arrays())
def test_bytes_are_as_triton_writes_and_reads_them(array):
    raw = to_raw(array, "BYTES")
    assert raw == serialize_byte_tensor(array).item()
    assert deserialize_bytes_tensor(raw).tolist() == array.ravel().tolist()


@given(arrays.arrays("U5", SHAPES, elements=st.text(st.characters(codec="utf-8", min_codepoint=1), max_size=5)))
def test_text_is_sent_as_utf8_as_triton_writes_it(array):
    for texts in (array, array.astype(np.object_)):
        assert to_raw(texts, "BYTES") == serialize_byte_tensor(array.astype(np.object_)).item()


MOST_PARTS, MOST_NUMBERS = 16 * 1024, 8 * 2**20


FIELDS = "request message: got more than 16384 fields, expected at most 16384. Send fewer of them at once, and large"
NUMBERS = "request message: got more than 8388608 typed numbers, expected at most 8388608. Send fewer"


def one_input(**fields):
    return {"inputs": [fields]}


def typed_texts(count, size=0):
    return one_input(name="n", contents={"bytes_contents": [b"t" * size] * count})


def typed_numbers(count, unsigned=0):
    contents = {"bool_contents": [True] * count, "uint_contents": [2**32 - 1] * unsigned}
    return one_input(contents=contents)


@pytest.mark.parametrize(
    ("fields", "most", "more", "message"),
    [
        (lambda count: {"inputs": [{}] * count}, MOST_PARTS, 1, FIELDS),
        (lambda count: {"raw_input_contents": [b""] * count}, MOST_PARTS, 1, FIELDS),
        # The input, its name and its contents are parts, too; so are the input and the one field of its dimensions.
        (typed_texts, MOST_PARTS - 3, 1, FIELDS),
        (lambda count: typed_texts(count, 200), MOST_PARTS - 3, 1, FIELDS),
        (lambda count: one_input(shape=[1] * count), MOST_PARTS - 2, 1, FIELDS),
        (lambda count: one_input(contents={"int64_contents": [1] * count}), MOST_NUMBERS, 1, NUMBERS),
        (lambda count: typed_numbers(MOST_NUMBERS, count - MOST_NUMBERS), MOST_NUMBERS, SMALL_BYTES, NUMBERS),
    ],
    ids=["inputs", "raw contents", "texts", "long texts", "dimensions", "integers", "integers of two fields"],
)
def test_parts_of_a_message_are_limited(fields, most, more, message):
    check_message(pb.ModelInferRequest(**fields(most)).SerializeToString())
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_message(pb.ModelInferRequest(**fields(most + more)).SerializeToString())


LARGE = "x" * (SMALL_BYTES + 1)
LARGE_PARAMETER = {"p": pb.InferParameter(string_param=LARGE[:-9])}


@pytest.mark.parametrize(
    ("subject", "fields"),
    [
        ("model_name", {"model_name": LARGE}),
        ("model_version", {"model_version": LARGE}),
        ("id of the request", {"id": LARGE}),
        ("parameter of the request", {"parameters": LARGE_PARAMETER}),
        ("requested output", {"outputs": [{"name": LARGE[:-4]}]}),
        ("input name", {"inputs": [{"name": LARGE}]}),
        ("input datatype", {"inputs": [{"datatype": LARGE}]}),
        ("parameter of an input", {"inputs": [{"parameters": LARGE_PARAMETER}]}),
    ],
)
def test_parts_that_are_never_large_are_refused_before_they_are_copied(subject, fields):
    with pytest.raises(InvalidRequest, match=f"^{subject}: got 6553. bytes, expected at most 65536. Send a shorter"):
        check_message(pb.ModelInferRequest(**fields).SerializeToString())


def test_nothing_hides_the_parts_behind_it():
    two, many = (pb.ModelInferRequest(inputs=[{}] * count).SerializeToString() for count in (2, MOST_PARTS + 1))
    group = bytes([15 << 3 | 3, 15 << 3 | 4])
    numbers = bytes([15 << 3 | 1]) + bytes(8) + bytes([15 << 3 | 5]) + bytes(4) + bytes([15 << 3]) + b"\xff" * 9 + b"\1"
    long_tag = b"\xfa\xff\xff\xff\x0f\0"
    for before in (group, numbers, long_tag, good().SerializeToString()):
        assert pb.ModelInferRequest.FromString(before + two)
        with pytest.raises(InvalidRequest, match="fields"):
            check_message(before + many)


@given(st.binary(max_size=200), st.integers(0, 200))
@settings(deadline=None, max_examples=300)
def test_what_is_no_message_is_left_to_the_parser(data, cut):
    check_message(data)
    check_message(good().SerializeToString()[:cut] + data)


LONG = "x" * 1025
LONGER = "got 1025 characters, expected at most 1024. Send a shorter one."
NAMES = [
    (lambda r: setattr(r, "id", LONG), f"id of the request: {LONGER}"),
    (lambda r: setattr(r, "model_name", LONG), f"model_name: {LONGER}"),
    (lambda r: setattr(r, "model_version", LONG), f"model_version: {LONGER}"),
    (lambda r: setattr(r.inputs[0], "name", LONG), f"input name: {LONGER}"),
    (lambda r: r.outputs.add(name=LONG), f"output name: {LONGER}"),
    (lambda r: r.parameters[LONG], f"parameter name: {LONGER}"),
    (lambda r: setattr(r.parameters["head"], "string_param", LONG), f"parameter 'head': {LONGER}"),
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
        lambda r: setattr(r.parameters["stop"], "string_param", "x" * 12_305),
        "parameter 'stop': got 12305 characters, expected 4 texts of up to 256 characters. Give fewer",
    ),
]


async def test_names_and_numbers_are_limited(tmp_path):
    async with running_service(tmp_path) as running:
        for change, message in NAMES:
            with pytest.raises(InvalidRequest, match=re.escape(message)):
                await running.infer(changed(change))
        longest = changed(lambda r: setattr(r, "id", LONG[1:]))
        for number in range(64):
            longest.parameters[f"own {number}"].bool_param = True
        assert (await running.infer(longest)).id == LONG[1:]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_refused_messages_have_the_status_of_other_bad_requests(tmp_path, transport):
    async with serving_here(tmp_path, transport) as channel:
        data = pb.ModelInferRequest(**typed_texts(MOST_PARTS, 4)).SerializeToString()
        for call in (
            channel.unary_unary(f"/{INFERENCE}/ModelInfer")(data, timeout=10),
            channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")(iter([data]), timeout=10),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert FIELDS in str(caught.value.details())
