"""Methods of servicers: limits of a request's bytes, callers' tokens, and errors as the status of a call."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from edge.errors import INTERNAL, InvalidRequest, Overloaded, RequestError
from edge.pb import inference_pb2 as pb
from edge.protocol import RETRY_AFTER_MS, RETRY_PUSHBACK_MS
from edge.rpc.limits import Limits
from edge.serving.request import SMALL_BYTES, check_message
from edge.serving.statuses import STATUSES, Code

log = logging.getLogger(__name__)

#: The ``wbits`` argument of zlib for each ``grpc-encoding`` that a client may use.
WINDOW_BITS: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
UNPARSEABLE: Final = (
    "request message: got bytes that do not parse, expected the protobuf of this method. "
    "Send the type that the .proto file names for it."
)
#: The first bytes of gzip and of deflate.
_PACKED = (0x1F, 0x78)
_Metadata = Iterable[tuple[str, str | bytes]]
_Answer = Callable[[Any, Any], Awaitable[Any]]


class Status(NamedTuple):
    """The end of a failed call: code, message and trailing metadata."""

    code: Code
    details: str
    trailers: tuple[tuple[str, str], ...] = ()


class Refused(Exception):
    """Ends a call with a status."""

    def __init__(self, code: Code, details: str, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(details)
        self.status = Status(code, details, trailers)


def inflate(data: bytes, encoding: bytes, max_bytes: int) -> bytes | Status | None:
    """Return the contents of exactly one stream of an encoding.

    None means that the data are something else, a Status that the contents exceed the limit, where decompression stops.
    """
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    try:
        inflated = inflater.decompress(data, max_bytes + 1)
    except zlib.error:
        return None
    if len(inflated) > max_bytes:
        return too_large("more, uncompressed", max_bytes)
    return inflated if inflater.eof and not inflater.unused_data else None


def too_large(given: str, max_bytes: int) -> Status:
    """Return the status of a message above the limit of its method."""
    details = f"message: got {given}, expected at most {max_bytes} bytes. Split it, or raise --max-message-bytes."
    return Status(Code.RESOURCE_EXHAUSTED, details)


def encoding_of(data: bytes) -> bytes | None:
    """Return the encoding by the first bytes of a message; None for plain protobuf.

    No protobuf begins as gzip does. One may begin as deflate does, but does not end with the checksum then.
    """
    if data[:2] == b"\x1f\x8b":
        return b"gzip"
    if data[:1] == b"\x78" and int.from_bytes(data[:2], "big") % 31 == 0:
        return b"deflate"
    return None


class Method(NamedTuple):
    """One method of a service.

    ``answer`` takes the request, or anything where the client streams, and the part of ``grpc.aio.ServicerContext``
    that reads, writes and describes the call; it returns the response, or None where the server streams. ``parse``
    returns the request of its bytes, or the Status that refuses them.
    """

    answer: _Answer
    parse: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]
    request_streaming: bool = False
    response_streaming: bool = False


#: Ends the call of a context with a status, by an exception.
Abort = Callable[[Any, Status], Awaitable[Any]]
#: Finds the method with a path for a caller with these metadata, or none; raises ``Refused``.
FindMethod = Callable[[str, _Metadata], Method | None]


def authorization(metadata: _Metadata) -> str | None:
    """Return the header with the caller's token; None without one."""
    return next((str(value) for name, value in metadata if name == "authorization"), None)


async def read_from(context: Any) -> Any:
    """Return the next request of a stream, None after the last; raise ``Refused`` for bytes that are none."""
    request = await context.read()
    if isinstance(request, Status):
        raise Refused(*request)
    return request if isinstance(request, Message) else None  # grpcio has its own mark for the end


def status_of(error: BaseException, method: str) -> Status:
    """Return the status for an error of a method; an unexpected one goes to the log and not to the client."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, RequestError):
        log.debug("%s: %s", method, error)
        trailers: tuple[tuple[str, str], ...] = ()
        if isinstance(error, Overloaded) and error.retry_after_ms:
            trailers = tuple((name, str(error.retry_after_ms)) for name in (RETRY_AFTER_MS, RETRY_PUSHBACK_MS))
        return Status(STATUSES[type(error)].grpc, str(error), trailers)
    log.error("%s failed", method, exc_info=error)
    return Status(Code.INTERNAL, INTERNAL)


async def refuse(_: object, status: Status) -> None:
    """Raise :class:`edge.rpc.methods.Refused` with a status."""
    raise Refused(*status)


def methods_of(
    service: ServiceDescriptor, servicer: object, limits: Limits, packed: bool, abort: Abort
) -> dict[str, Method]:
    """Return a servicer's methods, coroutines with the names in the ``.proto``, by path.

    ``packed`` says that the transport leaves messages compressed, and does not say which.
    """
    methods = {}
    for method in service.methods:
        path = f"/{service.full_name}/{method.name}"
        methods[path] = Method(
            _with_status(getattr(servicer, method.name), method.name, abort),
            _parser(GetMessageClass(method.input_type), limits.max_request_bytes(path), packed),
            GetMessageClass(method.output_type).SerializeToString,
            method.client_streaming,
            method.server_streaming,
        )
    return methods


def _with_status(answer: _Answer, name: str, abort: Abort) -> _Answer:
    @wraps(answer)
    async def with_status(request: Any, context: Any) -> Any:
        if isinstance(request, Status):  # its bytes were refused
            return await abort(context, request)
        try:
            return await answer(request, context)
        except Exception as error:
            status = status_of(error, name)
        # The exception that aborts a call and the call refer to each other. If that cycle also held the request, here
        # or as the exception's context, the request would stay until the garbage collector runs.
        del request
        return await abort(context, status)

    return with_status


def _parser(message: type[Message], max_bytes: int, packed: bool) -> Callable[[bytes], Any]:
    """Return a function from a request's bytes to its message, or to the Status that refuses it, never an error."""
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
            return Status(Code.INTERNAL, UNPARSEABLE)

    return parse
