"""Cases of RFC 7541: HPACK."""

from __future__ import annotations

from hyperframe.frame import HeadersFrame, SettingsFrame

from tests.conformance.http2.case import ANSWERED, GOAWAY, TABLE_SIZE, Case, Frames, Say, body, call, head
from tests.support.http2_client import RawClient

_ERROR = GOAWAY("COMPRESSION_ERROR")
#: What the client's SETTINGS leave as it is, and the server's do too.
_DEFAULT_TABLE_BYTES = 4096


def _block(after: bytes = b"", before: bytes = b"") -> Say:
    """A call whose field block has more bytes before and after it."""

    def say(client: RawClient) -> Frames:
        return [HeadersFrame(1, before + head(client).data + after, flags=["END_HEADERS"]), body()]

    return say


def _string(text: str, huffman: bool = False) -> bytes:
    """A string literal; Huffman-coded, it is of the letters a only."""
    if not huffman:
        return bytes((len(text),)) + text.encode()
    bits = "00011" * len(text)
    bits += "1" * (-len(bits) % 8)
    return bytes((0x80 | len(bits) // 8,)) + int(bits, 2).to_bytes(len(bits) // 8, "big")


def _literals() -> list[Case]:
    """The three kinds of literals, with indexed and new names, plain and Huffman-coded."""
    kinds = (
        ("6.2.1", "with incremental indexing", 0x40, 0x3F),
        ("6.2.2", "without indexing", 0, 0xF),
        ("6.2.3", "never indexed", 0x10, 0xF),
    )
    cases = []
    for section, kind, pattern, mask in kinds:
        for huffman in (False, True):
            coding = ", Huffman-coded" if huffman else ""
            name = bytes((pattern | 58,) if mask > 58 else (pattern | mask, 58 - mask))  # user-agent
            new = bytes((pattern,)) + _string("aaa", huffman)
            value = _string("aaaa", huffman)
            cases.append(Case(section, f"literal {kind}, indexed name{coding}", _block(name + value), ANSWERED))
            cases.append(Case(section, f"literal {kind}, new name{coding}", _block(new + value), ANSWERED))
    return cases


async def _without_a_table(client: RawClient) -> Frames:
    """The decoder raises unless the server's next field block begins with a table size update."""
    client.send(*call(client, stream=3))
    await client.answer(3)
    client.send(SettingsFrame(0, settings={TABLE_SIZE: 0}))
    await client.settle()
    client.decoder.max_allowed_table_size = 0
    return call(client, stream=5)


_NAME = b"\0" + _string("x-a")  # of a literal without indexing; a value has to follow

CASES = [
    Case("2.3.3", "indexed field beyond the tables", _block(b"\xff\x49"), _ERROR),
    Case("2.3.3", "literal with an indexed name beyond the tables", _block(b"\x7f\x89\1\1x"), _ERROR),
    Case(
        "4.1", "entry larger than the table", _block(b"\x40" + _string("x-a") + b"\x7f\xf1\x1f" + b"a" * 4208), ANSWERED
    ),
    Case("4.2", "table size update at the end of a field block", _block(b"\x20"), _ERROR),
    Case("4.2", "table size updates to 0 and back", _block(before=b"\x20\x3f\xe1\x1f"), ANSWERED),
    Case("4.2", "SETTINGS_HEADER_TABLE_SIZE of 0 for the server's table", _without_a_table, ANSWERED, stream=5),
    Case("5.1", "integer that overflows", _block(b"\xff" * 11 + b"\x7f"), _ERROR),
    Case("5.1", "integer without its end", _block(b"\xff\x80"), _ERROR),
    Case("5.2", "string longer than the field block", _block(_NAME + b"\x7f\x10a"), _ERROR),
    Case("5.2", "Huffman padding of more than 7 bits", _block(_NAME + b"\x82\x1f\xff"), _ERROR),
    Case("5.2", "Huffman padding of zeros", _block(_NAME + b"\x81\x18"), _ERROR),
    Case("5.2", "Huffman-coded EOS", _block(_NAME + b"\x84\xff\xff\xff\xff"), _ERROR),
    Case("6.1", "indexed field of the static table", _block(b"\x90"), ANSWERED),
    Case(
        "6.1", "indexed field of the dynamic table", _block(b"\x40" + _string("x-a") + _string("1") + b"\xbe"), ANSWERED
    ),
    Case("6.1", "index 0", _block(b"\x80"), _ERROR),
    *_literals(),
    Case("6.3", "table size update to 0", _block(before=b"\x20"), ANSWERED),
    Case("6.3", "table size update above SETTINGS_HEADER_TABLE_SIZE", _block(before=b"\x3f\xe2\x1f"), _ERROR),
]
