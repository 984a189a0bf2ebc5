"""Requests over HTTP: good and bad ones to the models of the shared server, and a client without our libraries."""

import http.client
import json
from contextlib import closing
from typing import NamedTuple

from edge.bundles.expression import tokenize
from tests.support.models import ORACLE
from tests.support.server_models import echo_input

JSON_LENGTH = "Inference-Header-Content-Length"
TOKENS = tokenize(["3 - -4 + 2"])
TOKEN_BYTES = TOKENS.tobytes()
INFER = f"/v2/models/{ORACLE}/infer"


class Heard(NamedTuple):
    """A response, its header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return str(self.json["error"])


def ask(url, path, body=None, *, method="", headers=None, timeout=10.0):
    """Send one request. Bytes are sent as they are, all else as JSON; without a body it is a GET."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(url, timeout=timeout)) as connection:
        connection.request(method or ("GET" if data is None else "POST"), path, data, dict(headers or {}))
        response = connection.getresponse()
        return Heard(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def tensor(name, datatype, shape, data):
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def busy(steps, timeout_us=0):
    parameters = {"parameters": {"timeout": timeout_us}} if timeout_us else {}
    return {"inputs": [tensor("steps", "INT64", [1], [steps])], **parameters}


def good():
    return {"inputs": [tensor("x", "FP32", [1, 15], TOKENS[0].tolist())]}


def changed(**fields):
    body = good()
    body["inputs"][0] |= fields
    return body


def without(field):
    body = good()
    del body["inputs"][0][field]
    return body


def text(*expressions):
    return {"inputs": [tensor("expression", "BYTES", [len(expressions), 1], list(expressions))]}


def output(name, **values):
    return {**good(), "outputs": [{"name": name, "parameters": values}]}


def binary(size=60, data=TOKEN_BYTES, length=None):
    """A body with its tensor behind the JSON, and the header with the length of the JSON."""
    item = {"name": "x", "datatype": "FP32", "shape": [1, 15], "parameters": {"binary_data_size": size}}
    written = json.dumps({"inputs": [item]}).encode()
    return written + data, {JSON_LENGTH: str(len(written)) if length is None else length}


def echo(datatype, *data):
    body = {"inputs": [tensor(echo_input(datatype), datatype, [len(data)], list(data))]}
    return f"/v2/models/echo-{datatype.lower()}/infer", body
