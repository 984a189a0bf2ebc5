"""Registers the methods of a servicer, finds their callers' tokens, and turns errors into the status of a call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from edge.errors import INTERNAL, InvalidRequest, Overloaded, RequestError
from edge.pb import inference_pb2 as pb
from edge.pb.pool import POOL
from edge.protocol import RETRY_AFTER_MS
from edge.rpc.limits import Limits
from edge.rpc.parsing import UNPARSEABLE, Status, encoding_of, inflate, too_large
from edge.serving.request_limits import SMALL_BYTES, check_message
from edge.serving.statuses import STATUSES

log = logging.getLogger(__name__)

STATUS_CODES: dict[type[RequestError], grpc.StatusCode] = {
    kind: getattr(grpc.StatusCode, status.grpc) for kind, status in STATUSES.items()
}
#: The first bytes of gzip and of deflate.
_PACKED = (0x1F, 0x78)
#: Makes a handler, by whether the client streams and whether the server does.
_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_Method = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the header with the caller's token; None without one."""
    return next((str(value) for name, value in metadata if name == "authorization"), None)


def status_of(error: BaseException, method: str) -> Status:
    """Return the status for an error of a method; an unexpected one goes to the log and not to the client."""
    if isinstance(error, RequestError):
        log.debug("%s: %s", method, error)
        trailers: tuple[tuple[str, str], ...] = ()
        if isinstance(error, Overloaded) and error.retry_after_ms:
            trailers = ((RETRY_AFTER_MS, str(error.retry_after_ms)),)
        return Status(STATUS_CODES[type(error)], str(error), trailers)
    log.error("%s failed", method, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, INTERNAL)


def handlers(service: str, servicer: object, limits: Limits, packed: bool) -> grpc.GenericRpcHandler:
    """Register a servicer's methods, coroutines with the names in the ``.proto``.

    ``packed`` says that the transport leaves messages compressed, and does not say which. The generated registration
    would report an unparseable message as UNKNOWN, with the text of the exception.
    """
    return grpc.method_handlers_generic_handler(
        service,
        {
            method.name: _MAKERS[method.client_streaming, method.server_streaming](
                _with_status(getattr(servicer, method.name), method.name),
                request_deserializer=_parser(
                    GetMessageClass(method.input_type), limits.max_request_bytes(f"/{service}/{method.name}"), packed
                ),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in POOL.FindServiceByName(service).methods
        },
    )


def _with_status(method: _Method, name: str) -> _Method:
    @wraps(method)
    async def handler(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, Status):  # its bytes were refused
            return await context.abort(*request)
        try:
            return await method(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            status = status_of(error, name)
        # The exception that aborts a call and the call refer to each other. If that cycle also held the request, here
        # or as the exception's context, the request would stay until the garbage collector runs.
        del request
        return await context.abort(*status)

    return handler


def _parser(message: type[Message], max_bytes: int, packed: bool) -> Callable[[bytes], Any]:
    """Return a function from a request's bytes to its message, or to the Status that refuses it.

    An error in a deserializer would end the call as UNKNOWN.
    """
    has_tensors = message is pb.ModelInferRequest

    def parse(data: bytes) -> Any:
        if packed and data and data[0] in _PACKED and (encoding := encoding_of(data)):
            inflated = inflate(data, encoding, max_bytes)
            if isinstance(inflated, Status):
                return inflated
            data = data if inflated is None else inflated
        if len(data) > max_bytes:
            return too_large(f"{len(data)} bytes", max_bytes)
        try:
            if has_tensors and len(data) > SMALL_BYTES:
                check_message(data)
            return message.FromString(data)
        except InvalidRequest as error:
            return status_of(error, message.DESCRIPTOR.name)
        except DecodeError:
            return Status(grpc.StatusCode.INTERNAL, UNPARSEABLE)

    return parse
