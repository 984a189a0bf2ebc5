"""Bearer tokens: a file that holds their hashes, and whose a token is."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge.errors import Literally, UsageError
from edge.security.scopes import SCOPES

#: Every entry is compared with at every call.
MAX_TOKENS = 256
_MAX_FILE_BYTES = 256 * 1024
#: So that a program that looks for secrets in files finds one.
_PREFIX = "fewheads_"
_TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LINE_FIX = "Make one with `fewheads token NAME --scope SCOPE`."


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file of tokens.

    Attributes:
        name: whose it is.
        scopes: what it is good for, of :data:`edge.security.scopes.SCOPES`.
        sha256: of the token, as 64 hexadecimal digits. The token itself is random and long, so its hash tells nothing.
    """

    name: str
    scopes: tuple[str, ...]
    sha256: str


def new_token(name: str, scopes: Sequence[str]) -> tuple[str, Token]:
    """Return a fresh token, and its line.

    Raises:
        UsageError: no such name or scope.
    """
    secret = _PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    token = Token(name, tuple(dict.fromkeys(scopes)), hashlib.sha256(secret.encode()).hexdigest())
    _check("token", token)
    return secret, token


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a file of tokens: JSON, one on each line; empty lines and those that begin with # are none.

    No error quotes a line, in which somebody may have written the token itself.

    Raises:
        UsageError: the file cannot be read, others may write it, a line is wrong, or there is none.
    """
    tokens: dict[str, Token] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        subject = f"--tokens {path} line {number}"
        try:
            token = msgspec.json.decode(line, type=Token)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            expected = '{"name": "…", "scopes": ["…"], "sha256": "…"}'
            raise UsageError(subject, given=Literally("something else"), expected=expected, fix=_LINE_FIX) from None
        _check(subject, token)
        if any(token.name == other.name or token.sha256 == other.sha256 for other in tokens.values()):
            given = Literally("a name or a token of a line before it")
            raise UsageError(subject, given=given, expected="new ones", fix="Remove one of the two lines.")
        tokens[token.name] = token
    if not 0 < len(tokens) <= MAX_TOKENS:
        given, fix = Literally(f"{len(tokens)} tokens"), "`fewheads token NAME --scope SCOPE` makes one."
        raise UsageError(f"--tokens {path}", given=given, expected=f"1 to {MAX_TOKENS}", fix=fix)
    return tuple(tokens.values())


def holder(tokens: Sequence[Token], secret: str) -> Token | None:
    """Return whose token it is; None if nobody's. How long that takes tells nothing about any of them."""
    digest = hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
    found = None
    for token in tokens:
        if hmac.compare_digest(digest, token.sha256):
            found = token
    return found


def _check(subject: str, token: Token) -> None:
    if not _NAME.fullmatch(token.name):
        expected = "1 to 64 letters, digits and . _ -, of which the first is a letter or digit"
        given = Literally("one that is none") if token.name.startswith(_PREFIX) else token.name
        raise UsageError(f"{subject} name", given=given, expected=expected, fix="Choose another name.")
    if not token.scopes or not set(token.scopes) <= set(SCOPES):
        unknown = [scope for scope in token.scopes if scope not in SCOPES]
        given = Literally(f"{len(unknown)} unknown" if unknown else "none")
        expected = f"some of {', '.join(SCOPES)}"
        raise UsageError(f"{subject} scopes", given=given, expected=expected, fix="Name what it is good for.")
    if not _DIGEST.fullmatch(token.sha256):
        given = Literally(f"{len(token.sha256)} characters that are none")
        expected = "the token's SHA-256 as 64 hexadecimal digits"
        raise UsageError(f"{subject} sha256", given=given, expected=expected, fix=_LINE_FIX)


def _read(path: Path) -> bytes:
    subject = f"--tokens {path}"
    try:
        # A pipe would wait for its other end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        fix = "`fewheads token NAME --scope SCOPE >> FILE` begins one."
        raise UsageError(subject, given=Literally(error.strerror), expected="a readable file", fix=fix) from None
    if not stat.S_ISREG(status.st_mode) or len(data) > _MAX_FILE_BYTES:
        given, expected = Literally("what is none"), f"a regular file of at most {_MAX_FILE_BYTES} bytes"
        raise UsageError(subject, given=given, expected=expected, fix="Give the path of the file.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        given = Literally(f"mode {stat.S_IMODE(status.st_mode):o}: others may add tokens of their own")
        raise UsageError(subject, given=given, expected="a file that only its owner may write", fix="chmod go-w it.")
    if status.st_uid not in (0, os.geteuid()):
        given = Literally(f"a file of user {status.st_uid}")
        fix = "Let the server's user, or root, own it."
        raise UsageError(subject, given=given, expected=f"one of user {os.geteuid()} or root", fix=fix)
    return data
