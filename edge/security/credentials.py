"""Credentials of servers and clients: certificates for TLS, and the token of a client."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from edge.errors import Raw, UsageError
from edge.security.certificates import Certificates, read_certificates
from edge.security.watched import Watched, read_limited

_MAX_TOKEN_BYTES = 4096


class ServerCertificates(Watched[Certificates]):
    """The files of :class:`Certificates`. Open connections keep the old certificate."""

    def __init__(self, chain: Path, key: Path, client_ca: Path | None) -> None:
        paths = (chain, key, *((client_ca,) if client_ca else ()))
        # Connections are rare, so each one checks the files.
        super().__init__("the TLS certificate", paths, lambda: read_certificates(chain, key, client_ca), 0.0)

    @property
    def problem(self) -> str:
        """Why the current files are not in force, or the current fault of the certificate; empty if there is none."""
        return super().problem or self.value.problem()

    def follow(self, context: Callable[[Certificates], ssl.SSLContext]) -> ssl.SSLContext:
        """Return a context that gives each new connection the current certificates' ``context``."""

        def replace(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = context(self.value)

        following = context(self.value)
        following.sni_callback = replace
        return following


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
