"""The blocking client against a real server, and against servers of another make that answer well, badly or wrongly."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from edge.bundles.expression import tokenize
from edge.client import Client, Credentials, InferFailure, InferRequest, InferResult, text
from edge.client.aio import AsyncClient
from edge.datatypes import NUMPY_TYPES
from edge.errors import ServerError, UsageError
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from edge.server import Ready
from tests.support.commands import answer, python
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE, VERSIONED
from tests.support.scripted_servers import doubled, peer, x
from tests.support.server_models import echo_input, echo_output

Stub = inference_pb2_grpc.GRPCInferenceServiceStub


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def asked(number: int, model: str = ORACLE, expression: str | None = None, **options: Any) -> InferRequest:
    inputs = {"expression": text([expression or f"{number} - 1"])}
    return InferRequest(model=model, inputs=inputs, request_id=str(number), **options)


# One question


def test_an_answer_and_where_it_came_from(client: Client, url: str) -> None:
    result = client.infer(ORACLE, {"expression": text(["1 + 2", "-5"])}, request_id="mine", priority=1, timings=True)
    assert result.outputs["value"].tolist() == [[3], [-5]]
    assert (result.model, result.model_version, result.request_id) == (ORACLE, "1", "mine")
    assert (result.call.server, result.call.attempts) == (url, 1)
    assert 0 < result.timings_ns["compute_infer_ns"] < result.timings_ns["request_ns"] < result.round_trip_ns
    assert client.infer(ORACLE, {"expression": text(["1"])}).timings_ns == {}


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_every_datatype_there_and_back(client: Client, datatype: str) -> None:
    values: Any = [b"", "grün".encode()] if datatype == "BYTES" else [0, 1]
    array = np.array(values, NUMPY_TYPES[datatype])
    back = client.infer(f"echo-{datatype.lower()}", {echo_input(datatype): array}).outputs[echo_output(datatype)]
    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()


def test_arrays_of_any_layout(client: Client) -> None:
    wide = np.arange(20, dtype=">f4")[::2]
    assert client.infer("echo-fp32", {"in_fp32": wide}).outputs["out_fp32"].tolist() == wide.tolist()
    words = client.infer("echo-bytes", {"in_bytes": np.array(["a", "漢"])}).outputs["out_bytes"]
    assert [word.decode() for word in words] == ["a", "漢"]


def test_versions_outputs_and_tiers(client: Client) -> None:
    tokens = {"x": tokenize(["1 + 2"])}
    assert client.infer(VERSIONED, tokens).model_version == "3"
    assert client.infer(VERSIONED, tokens, version="1", outputs=["value"], tier="full").model_version == "1"
    for wrong in ({"outputs": ["zz"]}, {"tier": "zz"}, {"policy": "zz"}, {"version": "2"}, {"priority": 11}):
        with pytest.raises(ServerError):
            client.infer(VERSIONED, tokens, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("array", "told"),
    [
        ([[1.0]], "got list, expected a NumPy array"),
        (np.zeros((1, 15), np.complex64), "got 'complex64', expected a type for one of BOOL"),
        (np.array([[1]], np.object_), "got 1, expected bytes or str in it"),
        (np.array([[b"a", None]], np.object_), "got None, expected bytes or str in it"),
    ],
    ids=["list", "complex", "number", "none"],
)
def test_inputs_that_are_no_tensors(client: Client, array: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        client.infer(ORACLE, {"x": array})


def test_arguments_that_make_no_sense(client: Client, url: str) -> None:
    with pytest.raises(TypeError, match="teir"):
        client.infer(ORACLE, {"expression": text(["1"])}, teir="full")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"server of a request in a stream: got '.*', expected none. Give server="):
        next(client.infer_stream([asked(1, server=url)]))
    (result,) = client.infer_stream([asked(1)], server=url)
    assert isinstance(result, InferResult)
    assert result.trip is result.call


@pytest.mark.parametrize(
    "method", ["infer", "metadata", "index", "load", "unload", "telemetry", "infer_stream", "watch"]
)
def test_both_clients_are_called_and_explained_alike(method: str) -> None:
    one, other = getattr(Client, method), getattr(AsyncClient, method)
    assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters)
    assert one.__doc__
    assert one.__doc__ == other.__doc__ or f":meth:`edge.client.Client.{method}`" in (other.__doc__ or "")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_times_that_are_none(client: Client, url: str, seconds: float) -> None:
    with pytest.raises(UsageError, match="timeout_seconds"):
        client.infer(ORACLE, {"expression": text(["1"])}, timeout_seconds=seconds)
    with pytest.raises(UsageError, match="timeout_seconds"):
        Client(url, seconds)


def test_bad_input_reaches_the_server_once(client: Client) -> None:
    def failures() -> int:
        return next(model.failure_count for model in client.telemetry().models if model.name == ORACLE)

    before = failures()
    with pytest.raises(ServerError) as caught:
        client.infer(ORACLE, {"x": np.zeros((1, 14), np.float32)})
    assert (caught.value.code, caught.value.attempts) == ("INVALID_ARGUMENT", 1)
    assert failures() == before + 1


# The rest of the protocol


def test_metadata_index_and_readiness(client: Client) -> None:
    inputs, outputs = client.metadata(ORACLE)
    assert {spec.name: spec.datatype for spec in inputs} == {"expression": "BYTES", "x": "FP32"}
    assert [(spec.name, spec.shape) for spec in outputs] == [("value", (-1, 1))]
    states = {model["name"]: model["state"] for model in client.index()}
    assert (states[ORACLE], states["broken"]) == ("READY", "UNAVAILABLE")
    assert not client.ready()  # one bundle is broken
    assert client.ready(ORACLE)
    assert client.ready(VERSIONED, "1")
    assert not client.ready("zz")


def test_readings_one_by_one(client: Client) -> None:
    assert client.telemetry().time_ms > 0
    with closing(client.watch(100)) as readings:
        times = [reading.time_ms for reading in islice(readings, 3)]
    assert times[2] - times[0] >= 150
    with pytest.raises(ServerError, match="at least 100"):
        next(client.watch(1))


def test_load_and_unload(bundles: list[Path]) -> None:
    only = [bundle for bundle in bundles if bundle.name == "oracle"]
    explicit = running_server(only, arguments=["--model-control=explicit"])
    with explicit as ready, Client(f"127.0.0.1:{ready.grpc_port}") as client:
        assert not client.ready(ORACLE)
        client.load(ORACLE, timeout_seconds=60)
        assert client.infer(ORACLE, {"expression": text(["1 + 1"])}).outputs["value"] == 2
        client.unload(ORACLE)
        assert not client.ready(ORACLE)
        with pytest.raises(ServerError) as caught:
            client.load("zz")
        assert caught.value.attempts == 1


# Streams


def test_a_stream_answers_in_order_and_tells_errors_in_their_turn(client: Client, url: str) -> None:
    requests = [asked(0), asked(1, timings=True), asked(2, expression="1 +"), asked(3, "zz"), asked(4)]
    answers = list(client.infer_stream(requests))
    assert [each.request_id for each in answers] == ["0", "1", "2", "3", "4"]
    assert [isinstance(each, InferResult) for each in answers] == [True, True, False, False, True]
    results = [each for each in answers if isinstance(each, InferResult)]
    assert [float(each.outputs["value"][0, 0]) for each in results] == [-1, 0, 3]
    assert all(each.call.server == url and each.round_trip_ns > 0 for each in answers if isinstance(each, InferResult))
    assert results[1].timings_ns
    failure = answers[2]
    assert isinstance(failure, InferFailure)
    assert (failure.model, failure.retry_after_ms) == (ORACLE, 0)
    assert "'1 +'" in failure.message
    error = failure.error()
    assert isinstance(error, ServerError)
    assert (
        f"model {ORACLE!r} at {url}, in a stream: got a failure, expected an answer. The server says: {failure.message}"
        in str(error)
    )


def test_a_time_limit_of_one_question_of_a_stream(client: Client) -> None:
    slow = InferRequest(model="busy", inputs={"steps": np.array([500])}, timeout_seconds=0.02)
    first, second = client.infer_stream([slow, asked(1)])
    assert isinstance(first, InferFailure)
    assert "ime" in first.message
    assert isinstance(second, InferResult)


def test_what_the_questions_raise_comes_after_the_answers(client: Client) -> None:
    def requests() -> Iterator[InferRequest]:
        yield asked(7)
        raise LookupError("the disk is full")

    answers = client.infer_stream(requests())
    assert next(answers).request_id == "7"
    with pytest.raises(LookupError, match="the disk is full"):
        next(answers)
    wrong = client.infer_stream([InferRequest(model=ORACLE, inputs={"x": [1]})])  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="expected a NumPy array"):
        next(wrong)


def test_leaving_a_stream_cancels_it(client: Client, server: Ready) -> None:
    with closing(client.infer_stream(asked(number) for number in range(10_000))) as answers:  # type: ignore[type-var]
        assert next(answers).request_id == "0"
    assert wait_until(lambda: is_at_rest(server))


def test_a_stream_that_breaks() -> None:
    def breaking(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        return doubled(request, context) if request.id == "0" else context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with peer(breaking) as one, Client(one.url) as client:
        answers = client.infer_stream(InferRequest(model="m", inputs=x(), request_id=str(n)) for n in range(3))
        assert next(answers).request_id == "0"
        with pytest.raises(ServerError, match=r"UNAVAILABLE \(gone\)") as caught:
            next(answers)
        assert caught.value.attempts == 1


def test_several_answers_to_one_question() -> None:
    """Servers of other makers may do that, and mark the last."""

    def thrice(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        response = doubled(request, context)
        response.parameters["triton_final_response"].bool_param = request.id == "last"
        return response

    with peer(thrice) as one, Client(one.url) as client:
        answers = list(client.infer_stream(InferRequest(model="m", inputs=x(), request_id=n) for n in ("a", "last")))
    assert len(answers) == 2


# Answers of other makers


def reply(**fields: Any) -> pb.ModelInferResponse:
    """``y``, FP32 of the shape (2,), with what is given in place of its raw contents."""
    output = {"name": "y", "datatype": "FP32", "shape": [2], **fields.pop("output", {})}
    return pb.ModelInferResponse(model_name="m", outputs=[output], **fields)


def test_typed_answers() -> None:
    def typed(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        response = reply(output={"contents": {"fp32_contents": [1.5, 2]}})
        response.outputs.add(name="words", datatype="BYTES", shape=[1], contents={"bytes_contents": [b"a"]})
        return response

    with peer(typed) as one, Client(one.url) as client:
        outputs = client.infer("m", x()).outputs
    assert outputs["y"].tolist() == [1.5, 2]
    assert outputs["words"].tolist() == [b"a"]


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (reply(), "got 0 elements in fp32_contents, expected 2 for shape [2]"),
        (reply(raw_output_contents=[b"1234"]), "got 4 raw bytes, expected 8 for FP32 [2]"),
        (reply(raw_output_contents=[b"12345678", b""]), "got 2 raw_output_contents, expected 1"),
        (reply(output={"shape": [-2]}, raw_output_contents=[b""]), "got the shape [-2], expected"),
        (reply(output={"shape": [1] * 40}, raw_output_contents=[b"1234"]), "expected a shape of"),
        (reply(output={"shape": [2**62, 2**62]}, raw_output_contents=[b""]), "got 0 raw bytes"),
        (reply(output={"shape": [0, 2**62, 2**62]}, raw_output_contents=[b""]), "expected FP32 [0, "),
        (reply(output={"datatype": "BF16"}, raw_output_contents=[b"1234"]), "got the datatype 'BF16', expected one"),
        (reply(output={"datatype": "BYTES"}, raw_output_contents=[b"\4\0\0\0abcd"]), "expected 2 elements"),
        (
            reply(output={"datatype": "UINT8", "contents": {"uint_contents": [1, 300]}}),
            "got 300, expected UINT8 values from 0 to 255",
        ),
    ],
    ids=["none", "few bytes", "two entries", "below 0", "rank", "huge", "overflow", "BF16", "BYTES", "UINT8"],
)
def test_answers_that_make_no_sense(response: pb.ModelInferResponse, told: str) -> None:
    with peer(lambda request, context: response) as one, Client(one.url) as client:
        with pytest.raises(ServerError) as caught:
            client.infer("m", x())
        assert len(one.asked) == 1
        assert told in str(caught.value)
        assert f"at {one.url}" in str(caught.value)
        with pytest.raises(ServerError):
            next(client.infer_stream([InferRequest(model="m", inputs=x())]))


def test_an_output_twice() -> None:
    response = reply(raw_output_contents=[b"12345678"] * 2)
    response.outputs.append(response.outputs[0])
    twice = pytest.raises(ServerError, match="got output 'y' twice, expected each output once")
    with peer(lambda request, context: response) as one, Client(one.url) as client, twice:
        client.infer("m", x())


# Its life


def test_threads_share_a_client(url: str) -> None:
    with Client(url) as client, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> float:
            return float(client.infer(ORACLE, {"expression": text([f"{number} + 1"])}).outputs["value"][0, 0])

        assert list(pool.map(ask, range(300))) == [number + 1 for number in range(300)]


def test_after_close_nothing_is_sent(url: str) -> None:
    client = Client(url)
    assert client.infer(ORACLE, {"expression": text(["1"])}).outputs["value"] == 1
    client.close()
    client.close()
    with pytest.raises(UsageError, match="a call after close"):
        client.infer(ORACLE, {"expression": text(["1"])})
    with pytest.raises(UsageError, match="a call after close"):
        next(client.infer_stream([asked(1)]))


def test_close_ends_what_is_on_its_way() -> None:
    begun, release = threading.Event(), threading.Event()

    def wait(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        begun.set()
        release.wait(10)
        return doubled(request, context)

    with peer(wait) as one, ThreadPoolExecutor(1) as pool:
        client = Client(one.url)
        call = pool.submit(client.infer, "m", x())
        assert begun.wait(10)
        client.close()
        with pytest.raises(ServerError, match="CANCELLED"):
            call.result(10)
        release.set()


FORK = """
import os, sys
from edge.client import Client
from edge.errors import UsageError
client = Client(sys.argv[1])
client.ready()
if os.fork() == 0:
    try:
        client.ready()
    except UsageError as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.wait()
"""


def test_a_fork_is_told_to_make_its_own(url: str) -> None:
    told = answer(python(FORK, url, GRPC_ENABLE_FORK_SUPPORT="0", PYTHONWARNINGS="ignore"))
    assert "Make a client in each process, after the fork." in told


def test_a_program_that_forgets_to_close_ends() -> None:
    code = """
import sys
from edge.client import Client
from edge.errors import ServerError
client = Client(["127.0.0.1:1", "127.0.0.1:2"])
try:
    client.index()
except ServerError as error:
    print(error.code)
"""
    done = python(code)
    assert answer(done) == "UNAVAILABLE\n"
    assert done.stderr == ""


def test_credentials_show_no_secret() -> None:
    assert repr(Credentials(token="secret")) == "Credentials()"


def test_a_token_goes_along_with_every_call() -> None:
    tokens: list[str] = []

    def look(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        tokens.append(dict(context.invocation_metadata())["authorization"])
        return doubled(request, context)

    with peer(look) as one, Client(one.url, credentials=Credentials(token="abc")) as client:
        client.infer("m", x())
        next(client.infer_stream([InferRequest(model="m", inputs=x())]))
    assert tokens == ["Bearer abc"] * 2


def test_the_types_are_told_to_type_checkers() -> None:
    assert files("edge").joinpath("py.typed").is_file()
