"""Authorization, the limit for bodies and the status of errors, common to all HTTP requests."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Collection
from inspect import isawaitable
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from edge.errors import (
    INTERNAL,
    FewheadsError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Raw,
    RequestError,
    Unauthenticated,
    Unsupported,
)
from edge.http.messages import accepted
from edge.protocol import RETRY_AFTER_MS
from edge.rest import completions, documents
from edge.rest.json_messages import INLINE_JSON_BYTES, encode, parse
from edge.security.access import CALLER, Access, Hosts
from edge.security.rate import client_of
from edge.serving.statuses import STATUSES
from edge.serving.threads import Threads

log = logging.getLogger(__name__)

#: The status, from nginx, of a client that disconnected before the response; nobody receives it.
_GONE: Final = 499

#: Of the paths with errors in OpenAI's form.
_OPENAI: Final = "/v1/"
_REQUEST: Final = "invalid_request_error"
#: With errors in Cohere's form.
_COHERE: Final = ("/v1/rerank", "/v2/rerank")
#: HTTP status to the error's type and code.
_TYPES: Final[dict[int, tuple[str, str]]] = {
    400: (_REQUEST, "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: (_REQUEST, "not_found"),
    405: (_REQUEST, "method_not_allowed"),
    413: (_REQUEST, "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    501: (_REQUEST, "not_supported"),
    503: ("server_error", "not_ready"),
    504: ("server_error", "deadline_exceeded"),
}

T = TypeVar("T")
#: Returns, possibly as an awaitable, a response or the value for a response of JSON.
Handler = Callable[[Request], object]


class Endpoints:
    """Turns handlers into endpoints for Starlette."""

    def __init__(self, access: Access | None, max_message_bytes: int, hosts: Hosts | None = None) -> None:
        self._access, self._hosts, self._max_message_bytes = access, hosts, max_message_bytes

    def endpoint(self, handler: Handler, rpc: str) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that authorizes callers as for an RPC and sends the status of errors."""

        async def endpoint(request: Request) -> Response:
            try:
                self._admit(request, rpc)
                answer = handler(request)
                if isawaitable(answer):
                    answer = await answer
                return answer if isinstance(answer, Response) else json_response(answer)
            except HTTPException:
                raise  # to http_error
            except Exception as error:
                return failed(request, error)

        return endpoint

    async def body(self, request: Request) -> bytes:
        """Return the body, without buffering more than the limit."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            fix = "Send the body as it is, or compress it over gRPC."
            raise Unsupported("Content-Encoding", given=encoding, expected="none", fix=fix)
        announced = request.headers.get("content-length", "0")  # h11 accepts digits only
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

    def authorize(self, request: Request, rpc: str) -> str:
        """Check that a caller may call an RPC, as :meth:`Access.authorize`; return an empty name without tokens."""
        return self._access.authorize(request.headers.get("authorization"), rpc) if self._access else ""

    def _admit(self, request: Request, rpc: str) -> None:
        if self._hosts:
            self._hosts.check(request.headers.get("host"))
        if "origin" in request.headers:
            # Otherwise any web page could make its visitor's browser call a server on the visitor's host.
            given, fix = request.headers["origin"], "Send requests from a program, or from the page's own server."
            raise HTTPException(403, str(InvalidRequest("Origin", given=given, expected="no web page", fix=fix)))
        caller = self.authorize(request, rpc)
        if caller or not self._access:
            accepted(request.scope)
        CALLER.set(caller or client_of(request.client.host if request.client else ""))

    def _too_large(self, given: str) -> HTTPException:
        fix = "Send it in smaller parts, or raise --max-message-bytes."
        expected = f"at most {self._max_message_bytes} bytes"
        return HTTPException(413, str(InvalidRequest("body", given=Raw(given), expected=expected, fix=fix)))


def failed(request: Request, error: Exception) -> Response:
    """Return the response for an error; one that is not expected goes to the log and not to the client."""
    path = request.url.path
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_GONE)
    if isinstance(error, RequestError):
        log.debug("%s: %s", path, error)
        return _error_response(path, STATUSES[type(error)].http, error, _headers(error))
    log.error("%s failed", path, exc_info=error)
    return _error_response(path, 500, INTERNAL)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await some work, and cancel it if the client disconnects. Read the body first."""
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
        # The error's traceback refers to this frame, which must not refer to the error.
        del answer


async def read_body(request: Request, body: bytes, threads: Threads, read: Callable[[dict[str, Any]], T]) -> T:
    """Return what ``read`` makes of the JSON in a body, on a thread if that takes milliseconds."""
    if len(body) <= INLINE_JSON_BYTES:
        return read(parse(body))
    return await unless_gone(request, threads.run(len(body), lambda: read(parse(body))))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def http_error(request: Request, error: Exception) -> Response:
    """Return the response for an unknown path or method, or for an error with a status of HTTP alone."""
    assert isinstance(error, HTTPException)
    said: object = error.detail
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == 404:
        expected, fix = "one of the protocol's", "GET /v2 is one of them."
        if path.startswith(_OPENAI):
            expected = "POST /v1/completions, /v1/embeddings or /v1/rerank, or GET /v1/models"
            fix = "Send a prompt, not a chat; GET /v1/models says what each model does."
        said = NotFound("path", given=path, expected=expected, fix=fix)
    elif error.status_code == 405:
        expected, fix = headers.get("Allow", "another one"), "Use the method that the protocol has for this path."
        said = InvalidRequest(f"method of {path!r}", given=request.method, expected=expected, fix=fix)
    return _error_response(path, error.status_code, said, headers)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(encode(content), status, headers, media_type="application/json")


def _error_response(path: str, status: int, error: object, headers: dict[str, str] | None = None) -> Response:
    content: dict[str, Any] = {"error": str(error)}
    if path in _COHERE:
        content = {"message": str(error)}
    elif path.startswith(_OPENAI):
        fields = completions.FIELDS if path.endswith("/completions") else documents.FIELDS
        content = _openai_error(status, error, fields)
    return json_response(content, status, headers)


def _headers(error: RequestError) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded) and error.retry_after_ms:
        # HTTP has whole seconds only; after fewer the server would refuse the client again.
        seconds = math.ceil(error.retry_after_ms / 1000)
        return {"Retry-After": str(seconds), RETRY_AFTER_MS: str(error.retry_after_ms)}
    return {}


def _openai_error(status: int, error: object, fields: Collection[str]) -> dict[str, Any]:
    """Return the body for an error, or its text, with the field of the request that it names."""
    kind, code = _TYPES.get(status, ("server_error", "internal_error"))
    words = re.findall(r"\w+", error.subject) if isinstance(error, FewheadsError) else []
    param = next((word for word in words if word in fields), None)
    if (status, param) == (404, "model"):
        code = "model_not_found"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
