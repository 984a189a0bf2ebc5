"""Registers the methods of a servicer, and turns what they raise into the status of the call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from edge.errors import INTERNAL, Overloaded, RequestError
from edge.pb.pool import POOL
from edge.protocol import RETRY_AFTER_MS
from edge.serving.statuses import STATUSES

log = logging.getLogger(__name__)

#: Errors to the status codes of gRPC.
STATUS_CODES: dict[type[RequestError], grpc.StatusCode] = {
    kind: getattr(grpc.StatusCode, status.grpc) for kind, status in STATUSES.items()
}
UNPARSEABLE = (
    "request message: got bytes that do not parse, expected the protobuf of this method. "
    "Send the type that the .proto file names for it."
)
#: Whether the client streams and whether the server does, to what makes a handler of that kind.
_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

R = TypeVar("R")
Method = Callable[[Any, Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[R]]


class Status(NamedTuple):
    """The end of a call that failed: its code, what the client reads, and trailing metadata."""

    code: grpc.StatusCode
    details: str
    trailers: tuple[tuple[str, str], ...] = ()


def status_of(error: BaseException, method: str) -> Status:
    """Return the status of a call whose method raised an error; an unforeseen one is logged and shows nothing."""
    if isinstance(error, RequestError):
        log.debug("%s: %s", method, error)
        trailers: tuple[tuple[str, str], ...] = ()
        if isinstance(error, Overloaded) and error.retry_after_ms:
            trailers = ((RETRY_AFTER_MS, str(error.retry_after_ms)),)
        return Status(STATUS_CODES[type(error)], str(error), trailers)
    log.error("%s failed", method, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, INTERNAL)


def rpc(method: Method[R]) -> Method[R]:
    """Make a method of a servicer end its call with the status of what it raises."""

    @wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request is None:
            return await context.abort(grpc.StatusCode.INTERNAL, UNPARSEABLE)
        try:
            return await method(self, request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            status = status_of(error, method.__name__)
        # gRPC ties the exception that aborts a call into a circle with the call. Nothing of the request may hang on it,
        # neither here nor as the context of that exception, or it would stay until Python's collector comes by.
        del request
        return await context.abort(*status)

    return handler


def handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """Register a servicer's methods as its ``.proto`` describes them.

    The generated registration would let grpc.aio answer an unparseable message with UNKNOWN and an exception's text.
    """
    return grpc.method_handlers_generic_handler(
        service,
        {
            method.name: _MAKERS[method.client_streaming, method.server_streaming](
                getattr(servicer, method.name),
                request_deserializer=_parser(GetMessageClass(method.input_type)),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in POOL.FindServiceByName(service).methods
        },
    )


def _parser(message: type[Message]) -> Callable[[bytes], Message | None]:
    def parse(data: bytes) -> Message | None:
        try:
            return message.FromString(data)
        except DecodeError:
            return None  # rpc() turns it into a status; raising here would not

    return parse
