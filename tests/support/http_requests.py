"""Requests over HTTP as a program without any library of ours would send them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

JSON_LENGTH = "Inference-Header-Content-Length"


class Heard(NamedTuple):
    """What came back; header names are in lower case."""

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
    connection = http.client.HTTPConnection(url, timeout=timeout)
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, dict(headers or {}))
        response = connection.getresponse()
        return Heard(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def tensor(name: str, datatype: str, shape: list[int], data: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def busy(steps: int, timeout_us: int = 0) -> dict[str, object]:
    """What asks the busy model for so many steps."""
    parameters = {"parameters": {"timeout": timeout_us}} if timeout_us else {}
    return {"inputs": [tensor("steps", "INT64", [1], [steps])], **parameters}
