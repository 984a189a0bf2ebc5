"""Statuses of HTTP requests; test_server.py and tests/conformance have those of the inference itself."""

import json
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from starlette.requests import Request

from edge import errors
from edge.connections.quota import Quota
from edge.datatypes import NUMPY_TYPES
from edge.errors import InvalidRequest
from edge.http.messages import state_of
from edge.rest.endpoint import Endpoints
from edge.rest.infer import BodyEncoder, infer_request
from edge.rest.json_messages import MAX_JSON_BYTES
from edge.security.access import INFER_STREAM, Access
from edge.serving.call import InferResponse
from edge.serving.wire import to_raw
from tests.support.http_requests import INFER, JSON_LENGTH, TOKENS, ask, binary, changed, echo, good, output, without
from tests.support.in_process import running_service
from tests.support.models import ORACLE
from tests.support.secured_servers import tokens_file
from tests.support.server_models import echo_input, echo_output, write_echo_bundle


class Row(NamedTuple):
    case: str
    status: int
    path: str
    body: Any = None
    text: str = ""
    headers: dict[str, str] | None = None
    method: str = ""


def infer(case, status, body, text="", path=INFER):
    body, headers = body if isinstance(body, tuple) else (body, None)
    return Row(case, status, path, body, text, headers)


REGISTER = "/v2/systemsharedmemory/region/a/register"
ROWS = [
    infer("a good request", 200, good(), '"data":[9.0]'),
    infer("whole numbers for floats", 200, changed(data=[1] * 15)),
    infer("a field that the protocol does not know", 200, {**good(), "mine": [1]}),
    # The body.
    infer("no body", 400, b"", "'expression'"),
    infer("no JSON", 400, b"{", "line 1, column 2"),
    infer("no UTF-8", 400, b'{"id": "\xff"}', "UTF-8"),
    infer("half a pair of surrogates", 400, b'{"id": "\\ud800"}', "UTF-8"),
    infer("a list", 400, [1], "expected an object"),
    infer("a field twice", 400, b'{"id": "1", "id": "2"}', "'id' twice"),
    infer("nested lists", 400, b"[" * 60_000 + b"]" * 60_000, "nested too deeply"),
    infer("brackets in a string", 400, json.dumps({"id": '[{\\"' * 40_000}).encode(), "id of the request: got 160000"),
    infer(
        "too many parameters",
        400,
        changed(parameters={f"own {n}": 1 for n in range(65)}),
        "parameters of input 'x': got 65",
    ),
    infer("too many inputs", 400, {"inputs": [{}] * 65}, "inputs of body: got 65, expected at most 64"),
    infer("too many outputs", 400, {**good(), "outputs": [{}] * 65}, "outputs of body: got 65, expected at most 64"),
    infer("too many lists", 400, b'{"id": [' + b"[]," * 65_536 + b"0]}", "more than 65536 lists and objects"),
    infer("lists nested 500 times", 400, b'{"id":' + b"[" * 500 + b"]" * 500 + b"}", "id of body: got a list"),
    infer("a number of too many digits", 400, f'{{"id": {"9" * 5000}}}'.encode(), "digits"),
    infer("too much JSON", 400, b" " * (4 * 2**20) + b"{}", "at most 4194304"),
    infer("id as a number", 400, {**good(), "id": 1}, "id of body: got a whole number"),
    # Models and versions.
    infer("unknown model", 404, good(), "model 'zz'", "/v2/models/zz/infer"),
    Row("unknown model, metadata", 404, "/v2/models/zz", None, "model 'zz'"),
    Row("unknown model, ready", 400, "/v2/models/zz/ready", None, '"ready":false'),
    # Inputs.
    infer("no name", 400, without("name"), "name of an input: got nothing"),
    infer("no data", 400, without("data"), "got no contents"),
    infer("datatype BF16", 400, changed(datatype="BF16"), "'BF16'"),
    infer("a shape of floats", 400, changed(shape=[1.0, 15]), "shape of input 'x': got a number"),
    infer("a shape beyond int64", 400, changed(shape=[2**63, 15]), "shape of input 'x'"),
    infer("a hundred thousand dims", 400, changed(shape=[2**62] * 100_000), "input 'x' shape"),
    infer("too few elements", 400, changed(data=[0] * 14), "14 elements"),
    infer("nested otherwise", 400, changed(data=[[0] * 5] * 3), "got a list of 3, expected a list of 1 there"),
    infer("nested and not", 400, changed(shape=[2, 15], data=[[0] * 15, 0]), "got a whole number, expected a list"),
    infer("data as a number", 400, changed(data=0), "data of input 'x': got a whole number"),
    infer("strings for floats", 400, changed(data=["1"] * 15), "got a string, expected a number or a whole number"),
    infer("a float too large", 400, changed(data=[1e39] * 15), "1e+39"),
    Row("an int too large", 400, *echo("INT8", 1, 128), "got 128"),
    Row("an int too large for FP64", 400, *echo("FP64", 10**400), "1.79769"),
    Row("FP16 as JSON", 400, *echo("FP16", 1.0), "FP16 as JSON"),
    # Binary data.
    infer("bytes that belong to nothing", 400, binary(data=TOKENS.tobytes() + b"1"), "1 bytes that belong to no input"),
    infer("too few bytes", 400, binary(data=b"1234"), "0 to the 4 bytes that are left"),
    infer("a size below 0", 400, binary(-60), "binary_data_size of input 'x'"),
    infer("binary data and data", 400, changed(parameters={"binary_data_size": 0}), "data and binary_data_size"),
    infer("a JSON length beyond the body", 400, binary(length="99999"), "at most"),
    infer("a JSON length of many digits", 400, binary(length="9" * 5000), "Inference-Header-Content-Length"),
    infer("a JSON length of ²", 400, binary(length="²"), "Inference-Header-Content-Length"),
    # Outputs.
    infer("an output without a name", 400, {**good(), "outputs": [{}]}, "name of an output"),
    infer("binary_data as a string", 400, output("value", binary_data="yes"), "binary_data of output 'value'"),
    # Parameters.
    infer("text for a bool", 400, {**good(), "parameters": {"binary_data_output": "yes"}}, "binary_data_output"),
    infer("a parameter of null", 400, {**good(), "parameters": {"mine": None}}, "got null"),
    infer("a parameter beyond uint64", 400, {**good(), "parameters": {"mine": 2**64}}, str(2**64)),
    infer("a client's own parameter", 200, {**good(), "parameters": {"mine": 2**64 - 1, "other": 1.5, "third": "é"}}),
    # Shared memory, which is not allowed here.
    infer("shared memory and data", 400, changed(parameters={"shared_memory_region": "a"}), "data and shared memory"),
    Row("register", 501, REGISTER, {"key": "/a", "offset": 0, "byte_size": 1}, "--allow-shared-memory"),
    Row("register without a key", 400, REGISTER, {"byte_size": 1}, "key of body"),
    Row("register a negative size", 400, REGISTER, {"key": "/a", "byte_size": -1}, "byte_size of body"),
    Row("CUDA status", 200, "/v2/cudasharedmemory/status", None, "[]"),
    Row("CUDA unregister", 200, "/v2/cudasharedmemory/unregister", {}),
    Row("CUDA register", 501, "/v2/cudasharedmemory/region/a/register", {"raw_handle": {"b64": ""}}, "IPC"),
    # What an option has to allow.
    Row("load with a parameter of null", 400, "/v2/repository/models/a/load", {"parameters": {"a": None}}, "got null"),
    Row("index of ready ones", 200, "/v2/repository/index", {"ready": True}),
    Row("index of neither", 400, "/v2/repository/index", {"ready": "yes"}, "ready of body"),
    # Settings.
    Row("log level below 0", 400, "/v2/logging", {"log_verbose_level": -1}, "got -1"),
    Row("trace off", 200, "/v2/trace/setting", {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": None}),
    Row("trace settings of a model", 200, f"/v2/models/{ORACLE}/trace/setting", None, "trace_level"),
    Row("trace level as a number", 400, "/v2/trace/setting", {"trace_level": [1]}, "got a whole number"),
    # The server, and HTTP itself.
    Row("all statistics", 200, "/v2/models/stats", None, '"model_stats":['),
    Row("an unknown path", 404, "/v2/zz", None, "'/v2/zz'"),
    Row("a slash too many", 404, "/v2/", None, "'/v2/'"),
    Row("GET of infer", 405, INFER, None, "expected POST"),
    Row("gzip", 501, INFER, b"\x1f\x8b", "Content-Encoding", {"Content-Encoding": "gzip"}),
    Row("under another name", 403, "/v2", None, "--allow-host", {"Host": "evil.example"}),
    Row("from a page", 403, INFER, good(), "http://evil.example", {"Origin": "http://evil.example"}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_request_gets_its_status(http_url, row):
    heard = ask(http_url, row.path, row.body, headers=row.headers, method=row.method)
    assert heard.status == row.status, heard.body
    if b'"error"' not in heard.body:
        assert row.text in heard.body.decode(errors="replace")
        return
    assert all(part in heard.error for part in (row.text, "got ", "expected ")), heard.error
    assert (heard.error[-1], len(heard.body) < 2000, list(heard.json)) == (".", True, ["error"])
    assert heard.headers["content-type"] == "application/json"


def test_fp16_is_refused_as_json_before_it_is_computed(http_url):
    item = {"name": echo_input("FP16"), "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}}

    def send(outputs, **values):
        written = json.dumps({"inputs": [item], "outputs": outputs, "parameters": values}).encode()
        return ask(http_url, "/v2/models/echo-fp16/infer", written + b"1234", headers={JSON_LENGTH: str(len(written))})

    def computed():
        return int(ask(http_url, "/v2/models/echo-fp16/stats").json["model_stats"][0]["execution_count"])

    before = computed()
    for refused in (send([]), send([{"name": echo_output("FP16")}])):
        assert (refused.status, "FP16 as JSON" in refused.error) == (400, True)
    assert computed() == before
    named = {"name": echo_output("FP16"), "parameters": {"binary_data": True}}
    for answered in (send([], binary_data_output=True), send([named])):
        assert answered.body.endswith(b"1234")
    assert computed() == before + 2


STATUSES = {"InvalidRequest": 400, "NotFound": 404, "AlreadyThere": 409, "Unauthenticated": 401, "RunnerError": 500}
STATUSES |= {"PermissionDenied": 403, "LoadFailed": 400, "ModelNotReady": 503, "Overloaded": 429, "Unsupported": 501}
STATUSES |= {"DeadlineExceeded": 504}


@pytest.mark.parametrize(("name", "status"), STATUSES.items())
async def test_error_gets_its_status(name, status):
    endpoints = Endpoints(None, 0)

    def fail(request):
        raise getattr(errors, name)("subject", given=1, expected="2", fix="Send 2.")

    request = Request({"type": "http", "method": "GET", "path": "/", "headers": [], "client": None})
    response = await endpoints.endpoint(fail, "/rpc")(request)
    body = {"error": "subject: got 1, expected 2. Send 2."}
    assert (response.status_code, json.loads(response.body)) == (status, body)


async def test_caller_of_health_alone_makes_room_for_new_connections(tmp_path):
    token = tokens_file(tmp_path / "tokens", asker=["infer"])["asker"]
    endpoints = Endpoints(Access(tmp_path / "tokens"), 0)
    share = Quota(1, 1).connect("http", 1, lambda: None)
    scope = {"type": "http", "method": "GET", "path": "/", "client": None, "state": state_of(share)}
    bearer = (b"authorization", b"Bearer " + token.encode())
    for rpc, header, status, proven in (
        ("/grpc.health.v1.Health/Check", bearer, 200, False),
        (INFER_STREAM, (b"x", b"y"), 401, False),
        (INFER_STREAM, bearer, 200, True),
    ):
        response = await endpoints.endpoint(lambda request: {}, rpc)(Request({**scope, "headers": [header]}))
        assert (response.status_code, share.proven) == (status, proven)


JSON_TYPES = sorted(set(NUMPY_TYPES) - {"FP16"})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
TEXTS = st.lists(TEXT, min_size=1, max_size=4)


def request_of(document, behind=b""):
    written = json.dumps(document).encode()
    return infer_request("m", "2", written + behind, len(written))


def inputs_of(document, behind=b""):
    return list(request_of(document, behind)[0].inputs)


def sent(array, datatype, data):
    item = {"name": "a", "datatype": datatype, "shape": list(array.shape), "data": data}
    return inputs_of({"inputs": [item]})[0].contents


def answered(array, *, binary, regions={}, **parameters):  # noqa: B006
    model = SimpleNamespace(name="m", version="1")
    return BodyEncoder(binary, {}).encode(InferResponse(model, "7", {"a": array}, regions, lambda: parameters))


@pytest.mark.parametrize("datatype", sorted(set(JSON_TYPES) - {"BYTES"}))
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_numbers_travel_as_json_bit_by_bit(datatype, data):
    array = data.draw(arrays.arrays(NUMPY_TYPES[datatype], arrays.array_shapes(max_dims=3, max_side=3)))
    for contents in (array.tolist(), array.ravel().tolist()):
        np.testing.assert_array_equal(sent(array, datatype, contents), array)
    body, json_bytes = answered(array, binary=False)
    assert json_bytes is None
    back = np.array(json.loads(body)["outputs"][0]["data"], NUMPY_TYPES[datatype])
    np.testing.assert_array_equal(back.reshape(array.shape), array)


@settings(max_examples=50, deadline=None)
@given(TEXTS)
def test_text_travels_as_json(texts):
    array = np.array([text.encode() for text in texts], np.object_)
    np.testing.assert_array_equal(sent(array, "BYTES", texts), array)
    assert json.loads(answered(array, binary=False)[0])["outputs"][0]["data"] == texts


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_every_datatype_travels_as_binary_data(datatype):
    texts = np.array([b"", b"\xff\0", b"1", b""], np.object_)
    array = texts if datatype == "BYTES" else np.array([0, 1, 1, 0]).astype(NUMPY_TYPES[datatype])
    raw = to_raw(array, datatype)
    item = {"datatype": datatype, "shape": [4], "parameters": {"binary_data_size": len(raw)}}
    request, _ = request_of({"inputs": [{"name": name, **item} for name in "ab"]}, raw + raw)
    assert [(tensor.contents, tensor.parameters) for tensor in request.inputs] == [(None, {})] * 2
    assert (request.contents, request.key[:5]) == ([raw, raw], b"\xffm\0002\0")
    named, _ = request_of({"id": "7", "inputs": [{"name": "a", **item}]}, raw)
    assert (named.key, next(iter(named.inputs)).contents) == (b"", raw)  # the key would be another one for each id
    assert (request.model_name, request.model_version) == ("m", "2")
    body, json_bytes = answered(array, binary=True)
    assert body[json_bytes:] == raw
    assert json.loads(body[:json_bytes])["outputs"][0]["parameters"] == {"binary_data_size": len(raw)}


def test_json_and_binary_data_in_one_body():
    items = [
        {"name": "a", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": 12, "mine": 1}},
        {"name": "b", "datatype": "INT8", "shape": [1, 2], "data": [[1, -1]]},
        {"name": "c", "datatype": "FP32", "shape": [3], "parameters": {"shared_memory_region": "r"}},
        {"name": "d", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
    ]
    inputs = inputs_of({"inputs": items}, b"twelve bytes" + b"\1\0\0\0x")
    assert [inputs[place].contents for place in (0, 2, 3)] == [b"twelve bytes", None, b"\1\0\0\0x"]
    assert (inputs[1].contents.tolist(), inputs[1].contents.dtype) == ([[1, -1]], np.int8)
    assert (inputs[0].parameters, inputs[2].parameters) == ({"mine": 1}, {"shared_memory_region": "r"})


def test_which_outputs_are_binary_data():
    outputs = [{"name": "a", "parameters": {"binary_data": False, "mine": True}}, {"name": "b"}]
    request, encoder = request_of({"parameters": {"binary_data_output": True}, "outputs": outputs})
    assert [encoder._binary(name) for name in "abc"] == [False, True, True]
    assert request.outputs == [("a", {"mine": True}), ("b", {})]


@pytest.mark.parametrize(
    ("elements", "binary", "beside"), [(2048, False, False), (2049, False, True), (2049, True, False)]
)
async def test_large_answers_as_json_are_written_beside_the_event_loop(tmp_path, elements, binary, beside):
    threads = []

    class Recorder(BodyEncoder):
        def encode(self, response):
            threads.append(threading.current_thread() is not threading.main_thread())
            return super().encode(response)

    array = np.arange(elements)
    item = {"name": "in_int64", "datatype": "INT64", "shape": [elements]}
    item["parameters"] = {"binary_data_size": array.nbytes}
    document = json.dumps({"inputs": [item]}).encode()
    request, _ = infer_request("echo-int64", "", document + array.tobytes(), len(document))
    async with running_service(tmp_path, lambda repository: write_echo_bundle(repository, "INT64")) as running:
        body, json_bytes = await running.service.infer(request, None, Recorder(binary, {}))
    assert threads == [beside]
    if not binary:
        assert json.loads(body[:json_bytes])["outputs"][0]["data"] == array.tolist()


def test_nonfinite_numbers_are_as_in_triton():
    array = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    body, _ = answered(array, binary=False)
    assert b"[NaN,Infinity,-Infinity,-0.0]" in body
    np.testing.assert_array_equal(sent(array, "FP32", json.loads(body)["outputs"][0]["data"]), array)


def test_outputs_that_json_cannot_represent_are_refused():
    large = np.zeros(MAX_JSON_BYTES + 1, np.uint8)
    invalid = np.array([b"a\xff"], np.object_)
    for array, text in ((invalid, r"got b'\\xff', expected UTF-8"), (large, f"{large.size} bytes as JSON")):
        with pytest.raises(InvalidRequest, match=text):
            answered(array, binary=False)


def test_parameters_of_a_response_and_an_output_in_shared_memory():
    writes = []
    regions = {"a": SimpleNamespace(write=writes.append)}
    body, json_bytes = answered(np.ones(1, np.float32), binary=True, regions=regions, tier="half", request_ns=2**40)
    assert (json_bytes, writes) == (None, [np.float32(1).tobytes()])
    answer = json.loads(body)
    assert (answer["id"], answer["parameters"]) == ("7", {"tier": "half", "request_ns": 2**40})
    # The stock client in C++ takes an output with parameters for one that has binary data.
    assert answer["outputs"] == [{"name": "a", "datatype": "FP32", "shape": [1]}]


@pytest.mark.parametrize(("regions", "classes", "binary"), [(("h",), {}, False), ((), {"h": 2}, False), ((), {}, True)])
def test_fp16_may_be_sent_in_another_way_than_json(regions, classes, binary):
    model = SimpleNamespace(outputs={"h": SimpleNamespace(datatype="FP16")})
    form = SimpleNamespace(output_names=["h"], model=model, classes=classes)
    BodyEncoder(False, {"h": binary}).check(form, regions)
    form.classes = {}
    with pytest.raises(InvalidRequest, match="output 'h': got FP16 as JSON, expected binary data"):
        BodyEncoder(False, {}).check(form, ())
