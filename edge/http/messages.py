"""Requests and responses, between the terms of h11 and those of ASGI."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

import h11
import msgspec

from edge.connections.quota import Share
from edge.errors import Overloaded, Raw

#: Types of ASGI.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_SHARE: Final = "fewheads.share"


def state_of(share: Share) -> dict[str, Any]:
    """Return the state of a request's scope, for :func:`accepted`."""
    return {_SHARE: share}


def accepted(scope: Scope) -> None:
    """Note that a caller may do what a request of it asks for, so that its connection does not make room for others."""
    share = scope.get("state", {}).get(_SHARE)
    if share:
        share.proven = True


RETRY_SECONDS: Final = 1
_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}

Headers = list[tuple[bytes, bytes]]


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
