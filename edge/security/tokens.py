"""Bearer tokens: the server's file of their hashes, the search for a token in it, and the file of a client."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from edge.errors import Raw, UsageError
from edge.security.watched import read_limited

#: ``infer`` sends requests to models, ``control`` changes the server, ``metrics`` reads its measurements.
SCOPES: Final = ("infer", "control", "metrics")
#: Every call is compared with all tokens, so that its duration reveals nothing.
MAX_TOKENS = 256
_MAX_FILE_BYTES = 256 * 1024
#: Of the file of a client with its only token.
_MAX_TOKEN_BYTES = 4096
#: Lets secret scanners recognize a token.
_PREFIX = "fewheads_"
_TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIX = "Make one with `fewheads token NAME --scope SCOPE`."


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file."""

    name: str
    scopes: tuple[str, ...]
    sha256: str  # in hexadecimal; a token is random and long, so its hash does not reveal it


def new_token(name: str, scopes: Sequence[str]) -> tuple[str, Token]:
    """Return a new token and its line."""
    secret = _PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    token = Token(name, tuple(dict.fromkeys(scopes)), hashlib.sha256(secret.encode()).hexdigest())
    _check("token", token)
    return secret, token


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a file with one token, as JSON, on each line. Empty lines and lines that begin with # are skipped.

    Errors quote no line, because it may contain a token.
    """
    tokens: list[Token] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        subject = f"--tokens {path} line {number}"
        try:
            token = msgspec.json.decode(line, type=Token)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            expected = '{"name": "…", "scopes": ["…"], "sha256": "…"}'
            raise UsageError(subject, given=Raw("something else"), expected=expected, fix=_FIX) from None
        _check(subject, token)
        if any(token.name == other.name or token.sha256 == other.sha256 for other in tokens):
            given = Raw("the name or the token of an earlier line")
            raise UsageError(subject, given=given, expected="different ones", fix="Remove one of the two lines.")
        tokens.append(token)
    if not 0 < len(tokens) <= MAX_TOKENS:
        given = Raw(f"{len(tokens)} tokens")
        raise UsageError(f"--tokens {path}", given=given, expected=f"1 to {MAX_TOKENS}", fix=_FIX)
    return tuple(tokens)


def find_token(tokens: Sequence[Token], secret: str) -> Token | None:
    """Return the entry of a token, or None. The duration reveals nothing about the entries."""
    digest = hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
    matches = [token for token in tokens if hmac.compare_digest(digest, token.sha256)]
    return matches[0] if matches else None


def _check(subject: str, token: Token) -> None:
    if not _NAME.fullmatch(token.name):
        expected = "1 to 64 letters, digits and . _ -, the first a letter or digit"
        given = Raw("a token") if token.name.startswith(_PREFIX) else token.name
        raise UsageError(f"{subject} name", given=given, expected=expected, fix="Choose another name.")
    if not token.scopes or not set(token.scopes) <= set(SCOPES):
        unknown = [scope for scope in token.scopes if scope not in SCOPES]
        given = Raw(f"{len(unknown)} unknown" if unknown else "none")
        fix = "List the scopes that the token grants."
        raise UsageError(f"{subject} scopes", given=given, expected=f"some of {', '.join(SCOPES)}", fix=fix)
    if not _DIGEST.fullmatch(token.sha256):
        given = Raw(f"{len(token.sha256)} characters of another form")
        expected = "the token's SHA-256 as 64 lowercase hexadecimal digits"
        raise UsageError(f"{subject} sha256", given=given, expected=expected, fix=_FIX)


def _read(path: Path) -> bytes:
    subject = f"--tokens {path}"
    fix = "Create it with `fewheads token NAME --scope SCOPE >> FILE`."
    data, status = read_limited(subject, path, _MAX_FILE_BYTES, fix)
    mode = stat.S_IMODE(status.st_mode)
    if data is None:
        given, expected = Raw("something else"), f"a regular file of at most {_MAX_FILE_BYTES} bytes"
        raise UsageError(subject, given=given, expected=expected, fix="Give the path of the file.")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        given = Raw(f"mode {mode:o}: others may add tokens of their own")
        raise UsageError(subject, given=given, expected="a file that only its owner may write", fix="chmod go-w it.")
    if status.st_uid not in (0, os.geteuid()):
        given, expected = Raw(f"a file of user {status.st_uid}"), f"a file of user {os.geteuid()} or root"
        fix = "Change its owner to the server's user or root."
        raise UsageError(subject, given=given, expected=expected, fix=fix)
    return data


def read_token(path: Path) -> str:
    """Return the token that is the only content of a file, which only its owner may read."""
    subject, fix = f"--token-file {path}", "Write the token into it, and `chmod 600` it."
    data, status = read_limited(subject, path, _MAX_TOKEN_BYTES, fix)
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        given = Raw(f"mode {mode:o}: others may read it")
        raise UsageError(subject, given=given, expected="a file that only its owner may read", fix=fix)
    token = (data or b"").strip()
    if not token or not all(0x21 <= byte <= 0x7E for byte in token):
        given = Raw(f"{status.st_size} bytes of another form")
        raise UsageError(subject, given=given, expected="one token and nothing else", fix=fix)
    return token.decode()
