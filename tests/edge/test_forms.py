"""The cache of validated forms: the same responses as without it, and no request passes that validation refuses."""

import asyncio
import os
import struct
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from edge.bundles.expression import tokenize
from edge.datatypes import TensorSpec
from edge.errors import DeadlineExceeded, InvalidRequest, ModelNotReady, NotFound
from edge.pb import inference_pb2 as pb
from edge.serving import forms
from edge.serving.request import InputTensor, UncheckedRequest, request_of
from edge.serving.shared_memory import DIRECTORY, SharedMemory
from edge.serving.wire import Sent, sent_inputs, to_raw
from tests.support.in_process import running_service
from tests.support.jobs import occupied
from tests.support.models import ORACLE, write_oracle_bundle
from tests.support.sample_requests import changed, expression, good, in_region, parameter, shaped, typed
from tests.support.server_models import write_echo_bundle


@pytest.fixture
def checks(monkeypatch):
    spy = Mock(wraps=forms.sent_inputs)
    monkeypatch.setattr(forms, "sent_inputs", spy)
    return spy


@pytest.fixture
def decodes(monkeypatch):
    spy = Mock(side_effect=Sent.decode)
    monkeypatch.setattr(Sent, "decode", lambda tensor: spy(tensor))
    return spy


@pytest.fixture
async def running(tmp_path):
    async with running_service(tmp_path) as running:
        yield running
        assert await running.at_rest()


def of_text(text):
    request = good()
    request.raw_input_contents[0] = tokenize([text]).tobytes()
    return request


def declared(array):
    """A request as HTTP makes it of JSON."""
    (tensor,) = request_of(good()).inputs
    tensor = tensor._replace(shape=array.shape, contents=array)
    return UncheckedRequest(ORACLE, "", "", {}, [tensor], [])


def value(response):
    (element,) = np.frombuffer(response.raw_output_contents[0], np.float32)
    return float(element)


async def test_arrays_of_json_count_once_while_they_wait(running):
    array = tokenize(["1 + 2", "3 - 4"])
    entry, model = running.repository.ready(ORACLE, "")
    request = declared(array)
    draft = running.service._forms.check(request, *forms.take_apart(request), entry, model)
    assert draft.unprepared().size_bytes == draft.prepare().form.size_bytes == array.nbytes


def test_texts_of_json_take_the_room_and_the_time_of_texts():
    texts = np.array([[b"a"], [b""]] * 500, np.object_)
    tensor = InputTensor("expression", "BYTES", texts.shape, {}, texts)
    raw = tensor._replace(contents=to_raw(texts, "BYTES"))
    specs = {"expression": TensorSpec("expression", "BYTES", (-1, -1))}
    json, binary = (sent_inputs([one], [], specs)["expression"] for one in (tensor, raw))
    assert json.elements == binary.elements == 1000
    assert json.held_bytes > 1000 * 33  # the objects


def test_only_raw_contents_of_the_graphs_own_inputs_are_a_form():
    def tensors(request, inputs):
        specs = {
            name: TensorSpec(name, datatype, (-1, -1)) for name, datatype in (("x", "FP32"), ("expression", "BYTES"))
        }
        sent = sent_inputs(request_of(request).inputs, request.raw_input_contents, specs)
        return forms._tensors_of(sent, inputs, {})

    assert tensors(good(), {"x"})
    assert tensors(good(), {"y"}) is None  # another input
    assert tensors(typed(), {"x"}) is None
    assert tensors(expression(b"1 + 2"), {"expression"}) is None


@pytest.mark.parametrize("rows", [1, 2, 64])
async def test_known_form_gets_the_same_response(running, checks, rows):
    request = good(rows)
    request.id = "seven"
    first = await running.infer(request)
    assert await running.infer(request) == first
    assert (first.id, list(first.outputs[0].shape)) == ("seven", [rows, 1])
    now = running.counted()
    assert (now.success, now.inference_count, now.execution_count) == (2, 2 * rows, 2)
    if rows == 1:
        for text, expected in (("3 + 4", 7), ("1 + 2 + 3", 6)):
            request = of_text(text)
            request.id = text
            answer = await running.infer(request)
            assert (answer.id, value(answer)) == (text, expected)
    assert checks.call_count == 1


@pytest.mark.parametrize("contents", [[b""], [bytes(8)], [bytes(120)], [bytes(60)] * 2, []], ids=len)
async def test_raw_contents_of_another_size_are_refused(running, contents):
    other = good()
    other.raw_input_contents[:] = contents
    await running.infer(good())
    for request in [other, good(65), shaped(2, 15), changed(lambda r: r.outputs.add(name="zz"))] * 2:
        with pytest.raises(InvalidRequest):
            await running.infer(request)
    assert value(await running.infer(good())) == 9
    assert running.counted().failures == {"InvalidRequest": 8}


def echo(datatype, raw, elements=2):
    request = pb.ModelInferRequest(model_name=f"echo-{datatype.lower()}")
    request.inputs.add(name=f"in_{datatype.lower()}", datatype=datatype, shape=[elements])
    request.raw_input_contents.append(raw)
    return request


def texts(*elements):
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def typed_values(*values):
    request = typed()
    request.inputs[0].contents.fp32_contents[:] = values
    return request


def number(value):
    return np.float32(value).tobytes()


#: By the reason for the validation, a bundle, and requests of one form, each with its response or its error.
CASES = {
    "BOOL": (
        partial(write_echo_bundle, datatype="BOOL"),
        [(echo("BOOL", b"\0\1"), b"\0\1"), (echo("BOOL", b"\1\0"), b"\1\0"), (echo("BOOL", b"\0\2"), b"\0\1")],
    ),
    "BYTES": (
        partial(write_echo_bundle, datatype="BYTES"),
        [(echo("BYTES", raw), raw) for raw in (texts(b"a", b"bc"), texts(b"ab", b"c"))]
        + [(echo("BYTES", texts(b"abc", b"")[:-4] + b"zzzz"), InvalidRequest)],
    ),
    "typed": (
        lambda repository: write_oracle_bundle(repository / "first"),
        [(typed_values(*tokenize(["3 + 4"])[0].tolist()), number(7)), (typed_values(*range(14)), InvalidRequest)],
    ),
    "preprocessed": (
        lambda repository: write_oracle_bundle(repository / "first"),
        [(expression(b"3 + 4"), number(7)), (expression(b"3 ? 4"), InvalidRequest)],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_values_that_need_validation_are_validated_each_time(tmp_path, checks, decodes, case):
    write, steps = CASES[case]
    async with running_service(tmp_path, write) as running:
        for request, expected in steps:
            if isinstance(expected, bytes):
                assert (await running.infer(request)).raw_output_contents == [expected]
            else:
                with pytest.raises(expected):
                    await running.infer(request)
        if case == "typed":  # nothing is known before
            assert checks.call_count == len(steps)
        else:
            assert (checks.call_count, decodes.call_count) == (1, len(steps))


async def test_texts_of_a_known_form_are_refused_as_at_first(running):
    wrong = [texts(b"3 + 4") + b"z", b"", texts(b"3 ? 4"), struct.pack("<I", 2**31) + b"3"]
    refused = []
    for _ in range(2):
        for raw in wrong:
            request = expression(b"")
            request.raw_input_contents[:] = [raw]
            with pytest.raises(InvalidRequest) as caught:
                await running.infer(request)
            refused.append(str(caught.value))
        assert value(await running.infer(expression(b"3 + 4"))) == 7
    assert refused[:4] == refused[4:]


@pytest.fixture
def region():
    path = DIRECTORY / f"fewheads-forms-{os.getpid()}"
    path.write_bytes(bytes(64))
    yield path
    path.unlink()


@pytest.mark.parametrize("side", ["input", "output"])
async def test_shared_memory_is_read_each_time(tmp_path, checks, region, side):
    memory = SharedMemory(10_000, 10_000)
    memory.register("region", f"/{region.name}", 0, 64)
    async with running_service(tmp_path, shared_memory=memory) as running:
        for text, expected in (("3 + 4", 7), ("3 - 4", -1), ("1 + 2", 3)):
            request = of_text(text)
            if side == "input":
                with open(region, "r+b") as file:
                    file.write(request.raw_input_contents.pop())
                in_region(request.inputs[0], "region", 60, 0)
                assert value(await running.infer(request)) == expected
            else:
                in_region(request.outputs.add(name="value"), "region", 4, 60)
                assert (await running.infer(request)).raw_output_contents == [b""]
                assert region.read_bytes()[60:] == number(expected)
        memory.unregister("region")
        with pytest.raises(NotFound, match="region"):
            await running.infer(request)
    assert checks.call_count == (4 if side == "input" else 3)  # the region of an output is looked up before the inputs


async def test_parameters_are_part_of_the_form_and_their_order_is_not(running, checks):
    names = [f"p{number}" for number in range(20)]
    for order in (names, names[::-1]):
        request = good()
        for name in order:
            request.parameters[name].bool_param = True
        await running.infer(request)
    assert checks.call_count == 1
    plain, timings = good(), parameter("timings", bool_param=True)
    for _ in range(3):
        assert "request_ns" not in (await running.infer(plain)).parameters
        assert "request_ns" in (await running.infer(timings)).parameters


async def test_known_form_keeps_its_timeout(running, checks):
    patient, hasty = good(), parameter("timeout", int64_param=100_000)
    for request in (patient, parameter("timeout", int64_param=60_000_000)):
        await running.infer(request)
    with occupied(running.scheduler):
        waiting = asyncio.create_task(running.infer(patient))
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                await running.infer(hasty)
        assert not waiting.done()
    assert value(await waiting) == 9
    assert checks.call_count == 3


async def test_unloaded_model_is_not_found_by_its_form(running):
    await running.infer(good())
    with occupied(running.scheduler):
        waiting = asyncio.create_task(running.infer(good()))
        await asyncio.sleep(0)
        unloading = asyncio.create_task(running.control.unload_model(ORACLE))
        while running.repository.find(ORACLE, "").state != "UNLOADING":
            await asyncio.sleep(0.001)
        with pytest.raises(ModelNotReady, match="UNLOADING"):
            await running.infer(good())
    assert value(await waiting) == 9
    await unloading
    with pytest.raises(NotFound):
        await running.infer(good())
    await running.control.load_model(ORACLE)
    assert value(await running.infer(good())) == 9


async def test_number_of_forms_is_limited(running, checks):
    sizes = []
    for number_ in range(300):
        await running.infer(parameter(f"p{number_}", bool_param=True))
        sizes.append(len(running.service._forms._forms))
    assert sizes == [*range(1, 257), *range(1, 45)]
    assert value(await running.infer(parameter(f"p{number_}", bool_param=True))) == 9  # the last one is kept
    assert checks.call_count == 300


async def test_size_of_a_form_is_limited(running, checks):
    def of_bytes(count):
        request = parameter("note", string_param="")
        key = len(forms.take_apart(parameter("note", string_param="x" * 3000))[1]) - 3000
        request.parameters["note"].string_param = "x" * (count - key)
        assert len(forms.take_apart(pb.ModelInferRequest.FromString(request.SerializeToString()))[1]) == count
        return request

    for count, checked in ((4096, 1), (4097, 2)):
        before = checks.call_count
        for _ in range(2):
            assert value(await running.infer(of_bytes(count))) == 9
        assert checks.call_count - before == checked
