"""Random and mutated HTTP requests: each gets a status, never one of a server fault, and none harms the server."""

import http.client
import json
from collections import Counter
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.rest.paths import RestApi
from tests.support.fuzzing import mutated, profile
from tests.support.http_requests import INFER, JSON_LENGTH, ask, binary, changed, good, output, text
from tests.support.models import ORACLE, VERSIONED

#: Of each kind; more are for changes of the code that reads JSON.
EXAMPLES = pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=pytest.mark.slow)])


ALLOWED = {200, 400, 404, 409, 413, 501, 503, 504}

integers = st.integers(-2, 16) | st.sampled_from([60, 2**31, 2**63, -(2**63), 2**64, 10**400])
scalars = st.none() | st.booleans() | integers | st.floats() | st.text(max_size=6)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
names = st.sampled_from(["x", "expression", "value", "in_int8", "out_int8", ""]) | anything
PARAMETERS = ["timeout", "priority", "sequence_id", "triton_x", "binary_data", "binary_data_output", "binary_data_size"]
PARAMETERS += ["shared_memory_region", "shared_memory_byte_size"]
parameters = st.dictionaries(st.sampled_from(PARAMETERS) | st.text(max_size=4), scalars, max_size=2) | anything
TENSOR = {
    "name": names,
    "datatype": st.sampled_from(["FP32", "BYTES", "INT8", "FP16", "BF16", "BOOL", "UINT64", ""]) | anything,
    "shape": st.sampled_from([[1, 15], [1, 1], [2]]) | st.lists(integers, max_size=4) | anything,
    "parameters": parameters,
    "data": st.lists(st.floats(width=32) | integers, min_size=15, max_size=15) | anything,
}
TENSORS = st.lists(st.fixed_dictionaries({}, optional=TENSOR) | anything, max_size=3) | anything
BODY = {"id": st.text(max_size=4) | anything, "parameters": parameters, "inputs": TENSORS, "outputs": TENSORS}


@st.composite
def bodies(draw):
    """A good body with one change in it or in its input."""
    body = good()
    where, fields = draw(st.sampled_from([(body, BODY), (body["inputs"][0], TENSOR)]))
    name = draw(st.sampled_from(sorted(fields)))
    where[name] = draw(fields[name])
    return body


KEYS = ["log_file", "log_format", "trace_level", "trace_rate", "parameters", "ready", "key", "offset", "byte_size"]
changes = st.dictionaries(st.sampled_from(KEYS), integers | anything)
models = st.sampled_from([ORACLE, VERSIONED, f"{ORACLE}/versions/1", "echo-int8", "echo-bytes", "broken", "zz"])
SEEDS = [b"{", b'{"id": "\\ud800"}', b'{"id": "1", "id": "2"}', binary()[0], binary(4, b"1234")[0]]
SEEDS += [json.dumps(body).encode() for body in (good(), changed(data=[[0] * 15]), text("3 - -4"))]
SEEDS += [json.dumps(output("value", binary_data=binary_data)).encode() for binary_data in (True, False)]
SEEDS.append(json.dumps({**good(), "parameters": {"mine": 1.5}}).encode())


@pytest.fixture
def connection(http_url):
    with closing(http.client.HTTPConnection(http_url, timeout=10)) as connection:
        yield connection


@EXAMPLES
def test_random_and_mutated_bodies(http_url, connection, examples):
    seen = Counter()

    def send(path, body, length):
        connection.request("POST", path, body, {JSON_LENGTH: length} if length is not None else {})
        response = connection.getresponse()
        answer = response.read()
        seen[response.status] += 1
        assert response.status in ALLOWED, answer
        if response.status != 200:
            assert "expected " in json.loads(answer)["error"]

    @profile(examples)
    @given(models, bodies(), st.just(b"") | st.binary(max_size=8), st.booleans())
    def random_ones(model, body, tail, announced):
        written = json.dumps(body).encode()
        send(f"/v2/models/{model}/infer", written + tail, str(len(written)) if announced else None)

    @profile(examples)
    @given(mutated(SEEDS), st.none() | st.integers(0, 300).map(str) | st.text(max_size=0))
    def mutated_ones(body, length):
        send(INFER, body, length)

    random_ones()
    mutated_ones()
    assert {200, 400, 404} <= set(seen), seen  # otherwise the test exercises nothing
    assert ask(http_url, INFER, good()).status == 200


@EXAMPLES
def test_every_path(http_url, examples):
    nothing = None
    routes = list(RestApi(nothing, nothing, nothing, nothing, nothing, None, 0).application.routes)
    paths = sorted((method, route.path) for route in routes for method in route.methods - {"HEAD"})
    assert len(paths) > 20
    words = st.sampled_from([ORACLE, VERSIONED, "1", "3", "a", "%2e%2e", "%00", "%ff"]) | st.integers().map(str)
    documents = (changes | anything).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=20)

    @profile(examples // 20)
    @given(st.lists(words, min_size=3, max_size=3), documents)
    def all_of_them(chosen, body):
        names = dict(zip(("model", "version", "region"), chosen, strict=True))
        for method, path in paths:
            heard = ask(http_url, path.format(**names), body if method == "POST" else None, method=method)
            assert heard.status in {*ALLOWED, 405}, (method, path, heard.body)

    all_of_them()
    assert ask(http_url, "/v2/health/live").status == 200
