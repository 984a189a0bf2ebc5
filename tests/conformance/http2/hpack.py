"""Cases of RFC 7541: HPACK."""

from __future__ import annotations

from hyperframe.frame import HeadersFrame, SettingsFrame

from tests.conformance.http2.case import ANSWERED, COMPRESSION, TABLE_SIZE, Case, Frames, Say, body, call, head
from tests.support.http2_client import RawClient


def _block(after: bytes = b"", before: bytes = b"") -> Say:
    def say(client: RawClient) -> Frames:
        return [HeadersFrame(1, before + head(client).data + after, flags=["END_HEADERS"]), body()]

    return say


def _string(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


async def _without_a_table(client: RawClient) -> Frames:
    """The decoder raises unless the server's next field block begins with a table size update."""
    client.send(*call(client, stream=3))
    await client.answer(3)
    client.send(SettingsFrame(0, settings={TABLE_SIZE: 0}))
    await client.settle()
    client.decoder.max_allowed_table_size = 0
    return call(client, stream=5)


_NAME = b"\0" + _string("x-a")  # of a literal without indexing; a value has to follow
_INDEXED = b"\x40" + _string("x-a")  # of a literal with incremental indexing
_AGENT = {"with incremental indexing": b"\x7a", "without indexing": b"\x0f\x2b", "never indexed": b"\x1f\x2b"}

CASES = [
    Case("2.3.3 indexed field beyond the tables", COMPRESSION, _block(b"\xff\x49")),
    Case("2.3.3 literal with an indexed name beyond the tables", COMPRESSION, _block(b"\x7f\x89\1\1x")),
    Case("4.1 entry larger than the table", ANSWERED, _block(_INDEXED + b"\x7f\xf1\x1f" + b"a" * 4208)),
    Case("4.2 table size update at the end of a field block", COMPRESSION, _block(b"\x20")),
    Case("4.2 table size updates to 0 and back", ANSWERED, _block(before=b"\x20\x3f\xe1\x1f")),
    Case("4.2 SETTINGS_HEADER_TABLE_SIZE of 0 for the server's table", ANSWERED, _without_a_table, stream=5),
    Case("5.1 integer that overflows", COMPRESSION, _block(b"\xff" * 11 + b"\x7f")),
    Case("5.1 integer without its end", COMPRESSION, _block(b"\xff\x80")),
    Case("5.2 string longer than the field block", COMPRESSION, _block(_NAME + b"\x7f\x10a")),
    Case("5.2 Huffman padding of more than 7 bits", COMPRESSION, _block(_NAME + b"\x82\x1f\xff")),
    Case("5.2 Huffman padding of zeros", COMPRESSION, _block(_NAME + b"\x81\x18")),
    Case("5.2 Huffman-coded EOS", COMPRESSION, _block(_NAME + b"\x84\xff\xff\xff\xff")),
    Case("6.1 indexed field of the static table", ANSWERED, _block(b"\x90")),
    Case("6.1 indexed field of the dynamic table", ANSWERED, _block(_INDEXED + _string("1") + b"\xbe")),
    Case("6.1 index 0", COMPRESSION, _block(b"\x80")),
    *(Case(f"6.2 user-agent {kind}", ANSWERED, _block(name + b"\x83\x18\xc6\x3f")) for kind, name in _AGENT.items()),
    Case("6.2.1 new name", ANSWERED, _block(_INDEXED + _string("1"))),
    Case("6.3 table size update above SETTINGS_HEADER_TABLE_SIZE", COMPRESSION, _block(before=b"\x3f\xe2\x1f")),
]
