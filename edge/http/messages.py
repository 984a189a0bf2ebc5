"""Requests and responses, between the terms of h11 and those of ASGI."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

import h11
import msgspec

from edge.errors import Overloaded, Raw
from edge.http.connection import SendingHalf
from edge.http.messages import Message, Scope, state_of

RETRY_SECONDS: Final = 1
_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}

Headers = list[tuple[bytes, bytes]]


def scope_of(connection: SendingHalf, request: h11.Request, headers: Headers) -> Scope:
    """Return what an application learns of a request."""
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode(),
        "scheme": connection.scheme,
        "client": connection.client,
        "server": connection.server,
        "method": request.method.decode(),
        "root_path": "",
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "headers": headers,
        "state": state_of(connection.share),
    }


def body_bytes(headers: Headers) -> int | None:
    """Return the announced size of a body, None for chunks."""
    size: int | None = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            size = int(value)
    return size


def response_of(start: Message, *, last: bool) -> h11.Response:
    """Return the head of a response, which also closes the connection if it is the ``last`` one."""
    headers = [*start.get("headers", ()), (b"date", _date(int(time.time()))), (b"server", b"fewheads")]
    if last:
        headers = [header for header in headers if header[0] != b"connection"]
        headers.append((b"connection", b"close"))
    status = start["status"]
    return h11.Response(status_code=status, headers=headers, reason=_REASONS.get(status, b""))


def error_response(status: int, error: object, headers: dict[str, str] | None = None) -> tuple[Message, bytes]:
    """Return the head and the body of a response that the server gives itself."""
    body = msgspec.json.encode({"error": str(error)})
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    pairs = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}, body


def no_room(size: int) -> Overloaded:
    """Return the error of a request that would make the server hold too much."""
    given, fix = Raw(f"{size} bytes"), "Try again later, with smaller or fewer requests at a time."
    expected = "no more than there is room for beside those of other clients"
    return Overloaded(
        "memory for this request", given=given, expected=expected, fix=fix, retry_after_ms=1000 * RETRY_SECONDS
    )


@lru_cache(1)
def _date(seconds: int) -> bytes:
    return formatdate(seconds, usegmt=True).encode()
