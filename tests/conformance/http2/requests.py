"""Cases of RFC 9113, section 8: requests."""

from __future__ import annotations

from hyperframe.frame import DataFrame, Frame, PushPromiseFrame

from tests.conformance.http2.case import ANSWERED, GOAWAY, LIVE, RESET, Case, Say, body, head
from tests.support.http2_client import Fields, RawClient

_MALFORMED = RESET("PROTOCOL_ERROR")
_METHOD, _SCHEME, _PATH, _AUTHORITY = (":method", "POST"), (":scheme", "http"), (":path", LIVE), (":authority", "test")
_PSEUDO: Fields = [_METHOD, _SCHEME, _PATH, _AUTHORITY]
_GRPC: Fields = [("te", "trailers"), ("content-type", "application/grpc")]


def _has(*fields: tuple[str, str]) -> Say:
    """A call with these fields and no others."""
    return lambda client: [client.fields(1, list(fields)), body()]


def _adds(name: str, value: str) -> Say:
    """A call with one more field."""
    return _has(*_PSEUDO, *_GRPC, (name, value))


def _without(field: tuple[str, str]) -> Say:
    return _has(*(one for one in _PSEUDO if one != field), *_GRPC)


def _ends_with(client: RawClient, fields: Fields, *flags: str) -> list[Frame]:
    """A call with trailers."""
    return [head(client), DataFrame(1, bytes(5)), client.fields(1, fields, *flags)]


def _only_head(**changed: str | None) -> Say:
    return lambda client: [head(client, "END_STREAM", **changed)]


CASES = [
    # 8.1 Message framing.
    Case("8.1", "trailers", lambda c: _ends_with(c, [("x-checksum", "1")], "END_STREAM"), ANSWERED),
    Case("8.1", "second HEADERS without END_STREAM", lambda c: _ends_with(c, [("x-checksum", "1")]), _MALFORMED),
    Case("8.1", "pseudo-header field in trailers", lambda c: _ends_with(c, [_METHOD], "END_STREAM"), _MALFORMED),
    Case("8.1", "GET", _only_head(_method="GET"), "HTTP 405"),
    Case("8.1", "HEAD", _only_head(_method="HEAD"), "HTTP 405"),
    Case("8.1.1", "content-length that is right", lambda c: [head(c, content_length="5"), body()], ANSWERED),
    Case("8.1.1", "content-length that is too small", lambda c: [head(c, content_length="1"), body()], _MALFORMED),
    Case("8.1.1", "content-length that is too large", lambda c: [head(c, content_length="6"), body()], _MALFORMED),
    Case(
        "8.1.1",
        "content-length that is not the sum of two DATA frames",
        lambda c: [head(c, content_length="6"), DataFrame(1, bytes(2)), DataFrame(1, bytes(3), flags=["END_STREAM"])],
        _MALFORMED,
    ),
    Case("8.1.1", "content-length of a request without DATA", _only_head(content_length="5"), _MALFORMED),
    Case("8.1.1", "content-length that is no number", lambda c: [head(c, content_length="x"), body()], _MALFORMED),
    # 8.2 Fields.
    Case("8.2", "upper case in a name", _adds("X-Upper", "1"), _MALFORMED),
    Case("8.2.1", "space in a name", _adds("x y", "1"), _MALFORMED),
    Case("8.2.1", "NUL in a value", _adds("x-a", "a\0b"), _MALFORMED),
    Case("8.2.1", "line break in a value", _adds("x-a", "a\r\nb"), _MALFORMED),
    Case("8.2.1", "space before a value", _adds("x-a", " a"), _MALFORMED),
    Case("8.2.1", "space after a value", _adds("x-a", "a\t"), _MALFORMED),
    Case("8.2.1", "name without characters", _adds("", "a"), _MALFORMED),
    Case("8.2.1", "value without characters", _adds("x-a", ""), ANSWERED),
    Case("8.2.2", "connection", _adds("connection", "close"), _MALFORMED),
    Case("8.2.2", "keep-alive", _adds("keep-alive", "timeout=5"), _MALFORMED),
    Case("8.2.2", "proxy-connection", _adds("proxy-connection", "close"), _MALFORMED),
    Case("8.2.2", "transfer-encoding", _adds("transfer-encoding", "chunked"), _MALFORMED),
    Case("8.2.2", "upgrade", _adds("upgrade", "websocket"), _MALFORMED),
    Case("8.2.2", "te other than trailers", lambda c: [head(c, te="gzip"), body()], _MALFORMED),
    Case("8.2.3", "cookie in several fields", _has(*_PSEUDO, *_GRPC, ("cookie", "a=1"), ("cookie", "b=2")), ANSWERED),
    # 8.3 Control data.
    Case("8.3", "unknown pseudo-header field", _has(*_PSEUDO, (":test", "1"), *_GRPC), _MALFORMED),
    Case("8.3", "pseudo-header field of responses", _has(*_PSEUDO, (":status", "200"), *_GRPC), _MALFORMED),
    Case("8.3", "pseudo-header field after another field", _has(_METHOD, _SCHEME, *_GRPC, _PATH), _MALFORMED),
    Case("8.3.1", "no :method", _without(_METHOD), _MALFORMED),
    Case("8.3.1", "no :scheme", _without(_SCHEME), _MALFORMED),
    Case("8.3.1", "no :path", _without(_PATH), _MALFORMED),
    Case("8.3.1", "no :authority", _without(_AUTHORITY), _MALFORMED),
    Case("8.3.1", "host in place of :authority", _has(*_PSEUDO[:3], *_GRPC, ("host", "test")), ANSWERED),
    Case("8.3.1", ":method twice", _has(_METHOD, *_PSEUDO, *_GRPC), _MALFORMED),
    Case("8.3.1", ":scheme twice", _has(_SCHEME, *_PSEUDO, *_GRPC), _MALFORMED),
    Case("8.3.1", ":path twice", _has(_PATH, *_PSEUDO, *_GRPC), _MALFORMED),
    Case("8.3.1", ":authority twice", _has(_AUTHORITY, *_PSEUDO, *_GRPC), _MALFORMED),
    Case("8.3.1", ":path without characters", lambda c: [head(c, _path=""), body()], _MALFORMED),
    Case("8.3.1", ":path without a slash", lambda c: [head(c, _path="x"), body()], _MALFORMED),
    Case("8.3.1", ":path of * with a method other than OPTIONS", lambda c: [head(c, _path="*"), body()], _MALFORMED),
    # 8.4 Server push, which is not for clients.
    Case(
        "8.4", "push", lambda c: [PushPromiseFrame(1, 2, head(c).data, flags=["END_HEADERS"])], GOAWAY("PROTOCOL_ERROR")
    ),
    # 8.5 CONNECT.
    Case("8.5", "CONNECT", _has((":method", "CONNECT"), _AUTHORITY), "HTTP 405"),
    Case("8.5", "CONNECT with :scheme and :path", _has((":method", "CONNECT"), *_PSEUDO[1:]), _MALFORMED),
    Case(
        "8.5",
        "CONNECT with :protocol",
        _has((":method", "CONNECT"), (":protocol", "websocket"), *_PSEUDO[1:]),
        _MALFORMED,
    ),
]
