"""Cases of RFC 9113, section 8: requests."""

from __future__ import annotations

from hyperframe.frame import DataFrame, Frame

from tests.conformance.http2.case import ANSWERED, LIVE, RESET, Case, Say, body, head
from tests.support.http2_client import Fields, RawClient

_MALFORMED = RESET("PROTOCOL_ERROR")
_METHOD, _SCHEME, _PATH, _AUTHORITY = (":method", "POST"), (":scheme", "http"), (":path", LIVE), (":authority", "test")
_PSEUDO: Fields = [_METHOD, _SCHEME, _PATH, _AUTHORITY]
_GRPC: Fields = [("te", "trailers"), ("content-type", "application/grpc")]


def _has(*fields: tuple[str, str]) -> Say:
    return lambda client: [client.fields(1, list(fields)), body()]


def _adds(name: str, value: str) -> Say:
    return _has(*_PSEUDO, *_GRPC, (name, value))


def _without(field: tuple[str, str]) -> Say:
    return _has(*(one for one in _PSEUDO if one != field), *_GRPC)


def _ends_with(client: RawClient, fields: Fields, *flags: str) -> list[Frame]:
    return [head(client), DataFrame(1, bytes(5)), client.fields(1, fields, *flags)]


def _only_head(**changed: str | None) -> Say:
    return lambda client: [head(client, "END_STREAM", **changed)]


def _changed(**changed: str | None) -> Say:
    return lambda client: [head(client, **changed), body()]


_CONNECT = (":method", "CONNECT")
CASES = [
    # Message framing.
    Case("8.1 trailers", ANSWERED, lambda c: _ends_with(c, [("x-checksum", "1")], "END_STREAM")),
    Case("8.1 second HEADERS without END_STREAM", _MALFORMED, lambda c: _ends_with(c, [("x-checksum", "1")])),
    Case("8.1 pseudo-header field in trailers", _MALFORMED, lambda c: _ends_with(c, [_METHOD], "END_STREAM")),
    Case("8.1 GET", "HTTP 405", _only_head(_method="GET")),
    Case("8.1.1 content-length that is right", ANSWERED, _changed(content_length="5")),
    Case("8.1.1 content-length that is too small", _MALFORMED, _changed(content_length="1")),
    Case("8.1.1 content-length that is too large", _MALFORMED, _changed(content_length="6")),
    Case("8.1.1 content-length of a request without DATA", _MALFORMED, _only_head(content_length="5")),
    Case("8.1.1 content-length that is no number", _MALFORMED, _changed(content_length="x")),
    # Fields.
    Case("8.2 upper case in a name", _MALFORMED, _adds("X-Upper", "1")),
    Case("8.2.1 space in a name", _MALFORMED, _adds("x y", "1")),
    Case("8.2.1 NUL in a value", _MALFORMED, _adds("x-a", "a\0b")),
    Case("8.2.1 line break in a value", _MALFORMED, _adds("x-a", "a\r\nb")),
    Case("8.2.1 space before a value", _MALFORMED, _adds("x-a", " a")),
    Case("8.2.1 name without characters", _MALFORMED, _adds("", "a")),
    Case("8.2.1 value without characters", ANSWERED, _adds("x-a", "")),
    Case("8.2.2 connection", _MALFORMED, _adds("connection", "close")),
    Case("8.2.2 transfer-encoding", _MALFORMED, _adds("transfer-encoding", "chunked")),
    Case("8.2.2 te other than trailers", _MALFORMED, _changed(te="gzip")),
    Case("8.2.3 cookie in several fields", ANSWERED, _has(*_PSEUDO, *_GRPC, ("cookie", "a=1"), ("cookie", "b=2"))),
    # Control data.
    Case("8.3 unknown pseudo-header field", _MALFORMED, _has(*_PSEUDO, (":test", "1"), *_GRPC)),
    Case("8.3 pseudo-header field after another field", _MALFORMED, _has(_METHOD, _SCHEME, *_GRPC, _PATH)),
    *(Case(f"8.3.1 no {field[0]}", _MALFORMED, _without(field)) for field in _PSEUDO),
    *(Case(f"8.3.1 {field[0]} twice", _MALFORMED, _has(field, *_PSEUDO, *_GRPC)) for field in _PSEUDO),
    Case("8.3.1 host in place of :authority", ANSWERED, _has(*_PSEUDO[:3], *_GRPC, ("host", "test"))),
    Case("8.3.1 :path without characters", _MALFORMED, _changed(_path="")),
    Case("8.3.1 :path of * with a method other than OPTIONS", _MALFORMED, _changed(_path="*")),
    # CONNECT.
    Case("8.5 CONNECT", "HTTP 405", _has(_CONNECT, _AUTHORITY)),
    Case("8.5 CONNECT with :protocol", _MALFORMED, _has(_CONNECT, (":protocol", "websocket"), *_PSEUDO[1:])),
]
