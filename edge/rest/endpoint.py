"""Steps common to all HTTP requests: authorization, the limit of the body, and the status of each error."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from edge.errors import (
    INTERNAL,
    InvalidRequest,
    Literally,
    NotFound,
    Overloaded,
    RequestError,
    Unauthenticated,
    Unsupported,
)
from edge.protocol import RETRY_AFTER_MS
from edge.rest.json_messages import encode
from edge.security.access import CALLER, Access
from edge.security.rate import client_of
from edge.serving.statuses import STATUSES

log = logging.getLogger(__name__)

#: A status of nginx that no client ever sees: it went before there was an answer.
_GONE: Final = 499

T = TypeVar("T")
#: What a handler returns is sent as JSON, unless it is a response already.
Handler = Callable[[Request], Awaitable[object]]


class Endpoints:
    """Makes handlers into endpoints of the ASGI library.

    Args:
        access: who may call what; None lets everyone.
        max_message_bytes: the largest body that is read.
    """

    def __init__(self, access: Access | None, max_message_bytes: int) -> None:
        self._access = access
        self._max_message_bytes = max_message_bytes

    def endpoint(self, handler: Handler, rpc: str) -> Callable[[Request], Awaitable[Response]]:
        """End a request with the status of its error; an unforeseen one is logged and shows the client nothing.

        Args:
            handler: answers it.
            rpc: the gRPC path of the RPC that it stands for, which tells who may ask.
        """

        async def endpoint(request: Request) -> Response:
            try:
                self._admit(request, rpc)
                answer = await handler(request)
                return answer if isinstance(answer, Response) else json_response(answer)
            except RequestError as error:
                log.debug("%s: %s", request.url.path, error)
                return json_response({"error": str(error)}, STATUSES[type(error)].http, _headers(error))
            except HTTPException:
                raise  # http_error answers it
            except ClientDisconnect:
                return Response(status_code=_GONE)
            except Exception:
                log.exception("%s failed", request.url.path)
                return json_response({"error": INTERNAL}, 500)

        return endpoint

    async def body(self, request: Request) -> bytes:
        """Return the body, of which no more than the limit is ever held.

        Raises:
            HTTPException: it is larger.
            Unsupported: it is compressed.
            ClientDisconnect: the client went.
        """
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            fix = "Send the body as it is, or compress it over gRPC."
            raise Unsupported("Content-Encoding", given=encoding, expected="none", fix=fix)
        announced = request.headers.get("content-length", "0")  # digits, or the HTTP library would have refused it
        if int(announced) > self._max_message_bytes:
            raise self._too_large(f"{announced} bytes")
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._max_message_bytes:
                raise self._too_large("more")
            chunks.append(chunk)
        return b"".join(chunks)

    def _admit(self, request: Request, rpc: str) -> None:
        if "origin" in request.headers:
            # Whatever site the user of a browser visits could otherwise have it ask a server of this host.
            given, fix = request.headers["origin"], "Ask from a program, or from the page's own server."
            raise HTTPException(403, str(InvalidRequest("Origin", given=given, expected="no web page", fix=fix)))
        caller = self._access.authorize(request.headers.get("authorization"), rpc) if self._access else ""
        CALLER.set(caller or client_of(request.client.host if request.client else ""))

    def _too_large(self, given: str) -> HTTPException:
        fix = "Send it in smaller parts, or raise --max-message-bytes."
        expected = f"at most {self._max_message_bytes} bytes"
        return HTTPException(413, str(InvalidRequest("body", given=Literally(given), expected=expected, fix=fix)))


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await some work, and cancel it when the client goes. The body has to have been read.

    Raises:
        ClientDisconnect: it went.
    """
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        gone.cancel()
        answer.cancel()
        # The future holds the error, the error its traceback, and that this frame.
        del answer


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def http_error(request: Request, error: Exception) -> Response:
    """Answer what there is no handler for, and what was refused with a status that only HTTP has."""
    assert isinstance(error, HTTPException)
    text, path = error.detail, request.url.path
    headers = dict(error.headers or {})
    if error.status_code == 404:
        text = str(NotFound("path", given=path, expected="one of the protocol's", fix="GET /v2 is one of them."))
    elif error.status_code == 405:
        expected, fix = headers.get("Allow", "another one"), "Use the method that the protocol has for this path."
        text = str(InvalidRequest(f"method of {path!r}", given=request.method, expected=expected, fix=fix))
    return json_response({"error": text}, error.status_code, headers)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(encode(content), status, headers, media_type="application/json")


def _headers(error: RequestError) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded) and error.retry_after_ms:
        # HTTP knows whole seconds only; who comes too early would be refused again.
        seconds = math.ceil(error.retry_after_ms / 1000)
        return {"Retry-After": str(seconds), RETRY_AFTER_MS: str(error.retry_after_ms)}
    return {}
