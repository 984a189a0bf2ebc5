"""The blocking and the asyncio client against a real server, and against servers that answer badly."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from itertools import islice

import grpc
import numpy as np
import pytest

from edge.bundles.expression import tokenize
from edge.client import AsyncClient, CallInfo, Client, InferFailure, InferRequest, InferResult, rpcs, text
from edge.client.inference import checked_timeout, decode, encode
from edge.client.rpcs import PendingRequests
from edge.datatypes import TensorSpec
from edge.errors import ServerError, UsageError
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from tests.support.clients import CLIENTS
from tests.support.commands import answer, python
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE, ORACLE_BUNDLE, VERSIONED
from tests.support.scripted_servers import doubled, peer, refusing, x


@pytest.fixture(params=CLIENTS)
def make(request):
    return CLIENTS[request.param]


@pytest.fixture(scope="module", params=CLIENTS)
def client(request, url):
    with CLIENTS[request.param](url) as client:
        yield client


def numbered(number, model=ORACLE, expression=None, **options):
    inputs = {"expression": text([expression or f"{number} - 1"])}
    return InferRequest(model=model, inputs=inputs, request_id=str(number), **options)


def test_request_becomes_one_message():
    request = InferRequest("m", x(), version="3", outputs=["y"], request_id="7", priority=2, tier="x1", policy="load")
    message = encode(request)
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "7")
    assert [(item.name, item.datatype, list(item.shape)) for item in message.inputs] == [("x", "FP32", [1])]
    assert [output.name for output in message.outputs] == ["y"]
    parameters = message.parameters
    assert set(parameters) == {"priority", "tier", "policy"}
    chosen = (parameters["priority"].int64_param, parameters["tier"].string_param, parameters["policy"].string_param)
    assert chosen == (2, "x1", "load")
    assert not encode(InferRequest("m", x(), timeout_seconds=1)).parameters
    assert encode(InferRequest("m", x(), timings=True)).parameters["timings"].bool_param
    for seconds, microseconds in ((1.5, 1_500_000), (1e-9, 1)):
        limited = encode(InferRequest("m", x(), timeout_seconds=seconds), in_stream=True)
        assert limited.parameters["timeout"].int64_param == microseconds


def test_invalid_tensor_or_time_limit_is_rejected():
    for array, message in (
        ([[1.0]], "got list, expected a NumPy array"),
        (np.zeros((1, 15), np.complex64), "got 'complex64', expected a type for one of BOOL"),
        (np.array([[b"a", None]], np.object_), "got None, expected bytes or str in it"),
    ):
        with pytest.raises(UsageError, match=f"^input 'x': {message}"):
            encode(InferRequest("m", {"x": array}))
    assert checked_timeout(999_999_999) == 999_999_999
    for seconds in (0, float("nan"), 1e9):
        with pytest.raises(UsageError, match=r"timeout_seconds: got .*, expected a finite number above 0"):
            Client("127.0.0.1:1", seconds)


def reply(count=1, **fields):
    output = {"name": "y", "datatype": "FP32", "shape": [2], **fields.pop("output", {})}
    return pb.ModelInferResponse(model_name="m", outputs=[output] * count, **fields)


def test_malformed_answer_is_an_error():
    raw = {"raw_output_contents": [b"12345678"]}
    for response, message in (
        (reply(), "got 0 elements in fp32_contents, expected 2 for shape [2]"),
        (reply(raw_output_contents=[b"1234"]), "got 4 raw bytes, expected 8 for FP32 [2]"),
        (reply(raw_output_contents=[b"", b""]), "got 2 raw_output_contents, expected 1, one for each output"),
        (reply(2, raw_output_contents=[b"12345678"] * 2), "got output 'y' twice, expected each output once"),
        (reply(output={"shape": [-2]}, **raw), "got the shape [-2], expected a shape of 0 or more in each dimension"),
        (reply(output={"shape": [1] * 33}, raw_output_contents=[b"1234"]), "expected a shape of 0 or more"),
        (reply(output={"shape": [0, 2**62, 2**62]}, raw_output_contents=[b""]), "expected FP32 [0, "),
        (reply(output={"datatype": "BF16"}, **raw), "got the datatype 'BF16', expected one of BOOL"),
        (reply(output={"datatype": "BYTES"}, raw_output_contents=[b"\4\0\0\0abcd"]), "expected 2 elements"),
        (reply(output={"datatype": "UINT8", "contents": {"uint_contents": [1, 300]}}), "got 300, expected UINT8"),
    ):
        with pytest.raises(ServerError) as caught:
            decode(response, CallInfo(server="board:1"))
        assert message in str(caught.value)
        assert "at board:1: got " in str(caught.value)


def test_typed_and_high_rank_answers_are_read():
    response = reply(output={"contents": {"fp32_contents": [1.5, 2]}})
    response.outputs.add(name="words", datatype="BYTES", shape=[1] * 32, contents={"bytes_contents": [b"a"]})
    result = decode(response, CallInfo(server="board:1"))
    assert {result} == {result}  # results are compared by identity, as arrays are not hashable
    outputs = result.outputs
    assert outputs["y"].tolist() == [1.5, 2]
    assert outputs["words"].shape == (1,) * 32


def test_only_the_last_answer_in_a_stream_completes_a_request():
    """Servers of other makers may answer a request several times, and mark the last answer."""
    pending, message = PendingRequests(), pb.ModelStreamInferResponse()
    pending.encode(InferRequest("m", x()))
    for last in (False, False, True):
        message.infer_response.parameters["triton_final_response"].bool_param = last
        assert isinstance(pending.decode(message, "board:1"), InferResult)
    with pytest.raises(ServerError, match="a stream at board:1: got one more answer, expected one for each request"):
        pending.decode(message, "board:1")


def test_malformed_answer_is_not_requested_again(make):
    with peer(lambda request, context: reply()) as one, make(one.url) as client:
        for call in (lambda: client.infer("m", x()), lambda: next(client.infer_stream([InferRequest("m", x())]))):
            with pytest.raises(ServerError, match=f"at {one.url}: got 0 elements"):
                call()
        assert len(one.requests) == 2


def test_broken_stream_ends_with_an_error(make):
    received = threading.Event()

    def breaking(request, context):
        if request.id == "0":
            return doubled(request, context)
        received.wait(10)  # grpc.aio drops answers that it has not read when the status comes
        return context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with peer(breaking) as one, make(one.url) as client:
        answers = client.infer_stream(InferRequest("m", x(), request_id=str(n)) for n in range(3))
        assert next(answers).request_id == "0"
        received.set()
        with pytest.raises(ServerError, match=r"UNAVAILABLE \(gone\)") as caught:
            next(answers)
        assert (caught.value.attempts, caught.value.server) == (1, one.url)


def test_close_ends_calls_in_progress_and_refuses_new_ones(make):
    with peer() as one, ThreadPoolExecutor(1) as pool, make(one.url) as client:
        one.behave = one.wait
        call = pool.submit(client.infer, "m", x())
        assert wait_until(lambda: one.requests)
        client.close()
        client.close()
        with pytest.raises(BaseException) as caught:
            call.result(10)
        assert "CANCELLED" in repr(caught.value).upper()
        for another in (lambda: client.infer("m", x()), lambda: next(client.infer_stream([InferRequest("m", x())]))):
            with pytest.raises(UsageError, match="the client: got a call after close"):
                another()


def test_answer_has_outputs_names_and_times(client, url):
    result = client.infer(ORACLE, {"expression": text(["1 + 2", "-5"])}, request_id="mine", priority=1, timings=True)
    assert result.outputs["value"].tolist() == [[3], [-5]]
    assert (result.model, result.model_version, result.request_id) == (ORACLE, "1", "mine")
    assert (result.call.server, result.call.attempts) == (url, 1)
    assert 0 < result.timings_ns["compute_infer_ns"] < result.timings_ns["request_ns"] < result.round_trip_ns < 1e10
    assert client.infer(ORACLE, {"expression": text(["1"])}).timings_ns == {}
    tokens = {"x": tokenize(["1 + 2"])}
    assert client.infer(VERSIONED, tokens).model_version == "3"
    assert client.infer(VERSIONED, tokens, version="1", outputs=["value"], tier="full").model_version == "1"
    for wrong in ({"outputs": ["zz"]}, {"tier": "zz"}, {"policy": "zz"}, {"version": "2"}, {"priority": 11}):
        with pytest.raises(ServerError):
            client.infer(VERSIONED, tokens, **wrong)
    with pytest.raises(TypeError, match="teir"):
        client.infer(ORACLE, tokens, teir="full")


def test_metadata_index_and_readiness(client):
    inputs, outputs = client.metadata(ORACLE)
    assert {spec.name: spec.datatype for spec in inputs} == {"expression": "BYTES", "x": "FP32"}
    assert outputs == (TensorSpec("value", "FP32", (-1, 1)),)
    models = {model["name"]: model for model in client.index()}
    assert models[ORACLE] == {"name": ORACLE, "version": "1", "state": "READY", "reason": ""}
    assert models["broken"]["state"] == "UNAVAILABLE"
    assert not client.ready()  # one bundle is broken
    assert client.ready(ORACLE)
    assert client.ready(VERSIONED, "1")
    assert not client.ready("zz")


def test_telemetry_once_and_repeatedly(client):
    assert client.telemetry().time_ms > 0
    with closing(client.watch(100)) as readings:
        times = [reading.time_ms for reading in islice(readings, 3)]
    assert times[2] - times[0] >= 150
    with pytest.raises(ServerError, match="at least 100"):
        next(client.watch(1))


def test_load_and_unload():
    with running_server([ORACLE_BUNDLE], arguments=["--model-control=explicit"]) as ready:
        for make in CLIENTS.values():
            with make(f"127.0.0.1:{ready.grpc_port}") as client:
                client.load(ORACLE, timeout_seconds=60)
                assert client.ready(ORACLE)
                client.unload(ORACLE)
                assert not client.ready(ORACLE)


def test_stream_answers_in_order_with_errors_in_their_place(client, url):
    requests = [numbered(0), numbered(1, timings=True), numbered(2, expression="1 +"), numbered(3, "zz"), numbered(4)]
    answers = list(client.infer_stream(requests, server=url))
    assert [each.request_id for each in answers] == ["0", "1", "2", "3", "4"]
    assert [type(each) for each in answers] == [InferResult, InferResult, InferFailure, InferFailure, InferResult]
    results = [each for each in answers if isinstance(each, InferResult)]
    assert [float(each.outputs["value"][0, 0]) for each in results] == [-1, 0, 3]
    assert all(each.call.server == url and 0 < each.round_trip_ns < 1e10 for each in results)
    assert results[1].timings_ns
    failure = answers[2]
    assert isinstance(failure, InferFailure)
    assert (failure.model, failure.retry_after_ms, failure.error().code) == (ORACLE, 0, "")
    assert "'1 +'" in failure.message
    assert str(failure.error()) == (
        f"model {ORACLE!r} at {url}, in a stream: got a failure, expected an answer. The server says: {failure.message}"
    )
    slow = InferRequest(model="busy", inputs={"steps": np.array([500])}, timeout_seconds=0.02)
    first, second = client.infer_stream([slow, numbered(1)])
    assert "ime" in getattr(first, "message", "")
    assert isinstance(second, InferResult)


def test_error_in_the_requests_is_raised_after_the_answers(client, url):
    def requests():
        yield numbered(7)
        raise LookupError("the disk is full")

    answers = client.infer_stream(requests())
    assert next(answers).request_id == "7"
    with pytest.raises(LookupError, match="the disk is full"):
        next(answers)
    with pytest.raises(UsageError, match="expected a NumPy array"):
        next(client.infer_stream([InferRequest(model=ORACLE, inputs={"x": [1]})]))
    with pytest.raises(UsageError, match=r"server of a request in a stream: got '.*', expected none. Give server="):
        next(client.infer_stream([numbered(1, server=url)]))


def test_leaving_a_stream_cancels_it(client, server):
    with closing(client.infer_stream(numbered(number) for number in range(10_000))) as answers:
        assert next(answers).request_id == "0"
    assert wait_until(lambda: is_at_rest(server))


async def test_requests_of_a_stream_may_be_asynchronous(url):
    async def requests():
        for request in (numbered(1), numbered(2, "zz")):
            await asyncio.sleep(0)
            yield request

    async with AsyncClient(url) as client, aclosing(client.infer_stream(requests())) as answers:
        assert [type(each) async for each in answers] == [InferResult, InferFailure]


@pytest.mark.parametrize("pausing", [False, True])
async def test_cancelled_call_is_cancelled_at_the_server_and_not_repeated(pausing):
    with peer(refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, after_ms=5000)) as one:
        if not pausing:
            one.behave = one.wait
        async with AsyncClient(one.url) as client:
            call = asyncio.create_task(client.infer("m", x()))
            assert await asyncio.to_thread(wait_until, lambda: one.requests)
            await asyncio.sleep(0.05)
            assert one.gone.is_set() == pausing
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(one.gone.wait, 2)
            assert len(one.requests) == 1


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_methods_have_the_name_signature_and_docstring_of_their_rpc(client):
    for rpc in (rpcs.infer, rpcs.metadata, rpcs.telemetry):
        method = getattr(client, rpc.__name__)
        names = list(inspect.signature(method).parameters)
        assert (names, method.__doc__) == (["self", *inspect.signature(rpc).parameters], rpc.__doc__)


def test_client_refuses_calls_after_a_fork(url):
    code = """
import os, sys
from edge.client import Client
client = Client(sys.argv[1])
client.ready()
if os.fork() == 0:
    try:
        client.ready()
    except Exception as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.wait()
"""
    output = answer(python(code, url, GRPC_ENABLE_FORK_SUPPORT="0", PYTHONWARNINGS="ignore"))
    assert output.startswith("the client: got a call in process ")
    assert output.endswith("Make a client in each process, after the fork.")
