"""Requests over HTTP: good and bad ones to the models of the shared server, and a client without our libraries."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

from edge.bundles.expression import tokenize
from tests.support.models import ORACLE
from tests.support.server_models import echo_input

JSON_LENGTH = "Inference-Header-Content-Length"
TOKENS = tokenize(["3 - -4 + 2"])
INFER = f"/v2/models/{ORACLE}/infer"


class Heard(NamedTuple):
    """A response, its header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"])


def ask(
    url: str,
    path: str,
    body: object = None,
    *,
    method: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: float = 10.0,
) -> Heard:
    """Send one request. Bytes are sent as they are, all else as JSON; without a body it is a GET."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(url, timeout=timeout)) as connection:
        connection.request(method or ("GET" if data is None else "POST"), path, data, dict(headers or {}))
        response = connection.getresponse()
        return Heard(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def tensor(name: str, datatype: str, shape: list[int], data: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def busy(steps: int, timeout_us: int = 0) -> dict[str, object]:
    parameters = {"parameters": {"timeout": timeout_us}} if timeout_us else {}
    return {"inputs": [tensor("steps", "INT64", [1], [steps])], **parameters}


def good() -> dict[str, Any]:
    return {"inputs": [tensor("x", "FP32", [1, 15], TOKENS[0].tolist())]}


def changed(**fields: Any) -> dict[str, Any]:
    body = good()
    body["inputs"][0] |= fields
    return body


def without(field: str) -> dict[str, Any]:
    body = good()
    del body["inputs"][0][field]
    return body


def text(*expressions: Any) -> dict[str, Any]:
    return {"inputs": [tensor("expression", "BYTES", [len(expressions), 1], list(expressions))]}


def output(name: str, **values: Any) -> dict[str, Any]:
    return {**good(), "outputs": [{"name": name, "parameters": values}]}


def binary(size: Any = 60, data: bytes = TOKENS.tobytes(), length: str | None = None) -> tuple[bytes, dict[str, str]]:
    """A body with its tensor behind the JSON, and the header with the length of the JSON."""
    item = {"name": "x", "datatype": "FP32", "shape": [1, 15], "parameters": {"binary_data_size": size}}
    written = json.dumps({"inputs": [item]}).encode()
    return written + data, {JSON_LENGTH: str(len(written)) if length is None else length}


def echo(datatype: str, *data: Any) -> tuple[str, dict[str, Any]]:
    body = {"inputs": [tensor(echo_input(datatype), datatype, [len(data)], list(data))]}
    return f"/v2/models/echo-{datatype.lower()}/infer", body
