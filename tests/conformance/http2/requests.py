"""Cases of RFC 9113, section 8, and of RFC 7541: requests, and the coding of their fields."""

from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame

from tests.conformance.http2.case import ANSWERED, COMPRESSION, LIVE, RESET, TABLE_SIZE, Case, body, call, head

_MALFORMED = RESET("PROTOCOL_ERROR")
_METHOD, _SCHEME, _PATH, _AUTHORITY = (":method", "POST"), (":scheme", "http"), (":path", LIVE), (":authority", "test")
_PSEUDO = [_METHOD, _SCHEME, _PATH, _AUTHORITY]
_GRPC = [("te", "trailers"), ("content-type", "application/grpc")]


def _has(*fields):
    return lambda client: [client.fields(1, list(fields)), body()]


def _adds(name, value):
    return _has(*_PSEUDO, *_GRPC, (name, value))


def _without(field):
    return _has(*(one for one in _PSEUDO if one != field), *_GRPC)


def _ends_with(client, fields, *flags):
    return [head(client), DataFrame(1, bytes(5)), client.fields(1, fields, *flags)]


def _only_head(**changed):
    return lambda client: [head(client, "END_STREAM", **changed)]


def _changed(**changed):
    return lambda client: [head(client, **changed), body()]


def _block(after=b"", before=b""):
    """A call whose field block has more bytes before and after it."""
    return lambda c: [HeadersFrame(1, before + head(c).data + after, flags=["END_HEADERS"]), body()]


async def _without_a_table(client):
    """The decoder raises unless the server's next field block begins with a table size update."""
    client.send(*call(client, stream=3))
    await client.answer(3)
    client.send(SettingsFrame(0, settings={TABLE_SIZE: 0}))
    await client.settle()
    client.decoder.max_allowed_table_size = 0
    return call(client, stream=5)


_INDEXED = b"\x40\3x-a"  # of a literal with incremental indexing
_CONNECT = (":method", "CONNECT")
CASES = [
    # Message framing.
    Case("8.1 trailers", ANSWERED, lambda c: _ends_with(c, [("x-checksum", "1")], "END_STREAM")),
    Case("8.1 second HEADERS without END_STREAM", _MALFORMED, lambda c: _ends_with(c, [("x-checksum", "1")])),
    Case("8.1 pseudo-header field in trailers", _MALFORMED, lambda c: _ends_with(c, [_METHOD], "END_STREAM")),
    Case("8.1 GET", "HTTP 405", _only_head(_method="GET")),
    Case("8.1.1 content-length that is right", ANSWERED, _changed(content_length="5")),
    Case("8.1.1 content-length that is too small", _MALFORMED, _changed(content_length="1")),
    Case("8.1.1 content-length of a request without DATA", _MALFORMED, _only_head(content_length="5")),
    # Fields.
    Case("8.2 upper case in a name", _MALFORMED, _adds("X-Upper", "1")),
    Case("8.2.1 NUL in a value", _MALFORMED, _adds("x-a", "a\0b")),
    Case("8.2.2 connection", _MALFORMED, _adds("connection", "close")),
    Case("8.2.2 te other than trailers", _MALFORMED, _changed(te="gzip")),
    Case("8.2.3 cookie in several fields", ANSWERED, _has(*_PSEUDO, *_GRPC, ("cookie", "a=1"), ("cookie", "b=2"))),
    # Control data.
    Case("8.3 unknown pseudo-header field", _MALFORMED, _has(*_PSEUDO, (":test", "1"), *_GRPC)),
    Case("8.3 pseudo-header field after another field", _MALFORMED, _has(_METHOD, _SCHEME, *_GRPC, _PATH)),
    *(Case(f"8.3.1 no {field[0]}", _MALFORMED, _without(field)) for field in _PSEUDO),
    *(Case(f"8.3.1 {field[0]} twice", _MALFORMED, _has(field, *_PSEUDO, *_GRPC)) for field in _PSEUDO),
    Case("8.3.1 host in place of :authority", ANSWERED, _has(*_PSEUDO[:3], *_GRPC, ("host", "test"))),
    Case("8.3.1 :path without characters", _MALFORMED, _changed(_path="")),
    # CONNECT.
    Case("8.5 CONNECT", "HTTP 405", _has(_CONNECT, _AUTHORITY)),
    # The coding of fields.
    Case("HPACK 2.3.3 indexed field beyond the tables", COMPRESSION, _block(b"\xff\x49")),
    Case("HPACK 4.2 SETTINGS_HEADER_TABLE_SIZE of 0 for the server's table", ANSWERED, _without_a_table, stream=5),
    Case("HPACK 6.1 indexed field of the dynamic table", ANSWERED, _block(_INDEXED + b"\x011" + b"\xbe")),
    Case("HPACK 6.3 table size update above SETTINGS_HEADER_TABLE_SIZE", COMPRESSION, _block(before=b"\x3f\xe2\x1f")),
]
