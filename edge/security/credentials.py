"""gRPC's credentials: what a server shows, and what a client checks, shows and sends, blocking or with asyncio."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import grpc

from edge.errors import Literally, UsageError
from edge.security.certificates import Certificates, read_certificates, read_pem
from edge.security.watched import Watched

_MAX_TOKEN_BYTES = 4096


class ServerCertificates:
    """The server's certificate, which is read again when its files change. Open connections go on with the old one.

    Args:
        chain: the server's certificate, and those between it and its authority, in PEM.
        key: its private key.
        client_ca: the authorities that clients' certificates must come from; None asks for none.

    Raises:
        UsageError: a file is wrong.
    """

    def __init__(self, chain: Path, key: Path, client_ca: Path | None) -> None:
        paths = (chain, key, *((client_ca,) if client_ca else ()))
        # Connections are few, so each of them looks.
        self._files: Watched[Certificates] = Watched(
            "the TLS certificate", paths, lambda: read_certificates(chain, key, client_ca), look_seconds=0.0
        )
        self._needs_client = client_ca is not None

    @property
    def problem(self) -> str:
        """Why the files are not in force as they are, or what is wrong with the certificate; empty if nothing is."""
        return self._files.problem or self._files.value.problem()

    @property
    def now(self) -> Certificates:
        """What new connections are shown."""
        return self._files.value

    def follow(self, context: Callable[[Certificates], ssl.SSLContext]) -> ssl.SSLContext:
        """Return a context by which each new connection is shown the files as they are then.

        Args:
            context: which of the certificates'.
        """

        def take(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = context(self.now)

        following = context(self.now)
        following.sni_callback = take
        return following

    def grpc(self) -> grpc.ServerCredentials:
        """Return credentials of which each new connection gets those of the files as they are then."""
        shown = [self.now]

        def changed() -> grpc.ServerCertificateConfiguration | None:
            now = self.now
            if now is shown[0]:
                return None
            shown[0] = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(_configuration(shown[0]), changed, self._needs_client)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)


def channel_credentials(
    tls_ca: Path | None = None, tls_certificate: Path | None = None, tls_key: Path | None = None
) -> grpc.ChannelCredentials:
    """Return what ``grpc.secure_channel`` and ``grpc.aio.secure_channel`` take.

    Args:
        tls_ca: the authorities that the server's certificate must come from; None is those that gRPC brings.
        tls_certificate: the client's own, for servers that ask for one.
        tls_key: its private key.

    Raises:
        UsageError: a file is missing or no PEM, a key belongs to another certificate, or one comes without the other.
    """
    if (tls_certificate is None) != (tls_key is None):
        given = Literally("one without the other")
        fix = "Give both, or leave both out."
        raise UsageError("--tls-certificate and --tls-key", given=given, expected="both or none", fix=fix)
    roots = read_pem("--tls-ca", tls_ca) if tls_ca else None
    if tls_certificate is None or tls_key is None:
        return grpc.ssl_channel_credentials(roots)
    own = read_certificates(tls_certificate, tls_key, None)
    return grpc.ssl_channel_credentials(roots, own.key, own.chain)


def call_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call; none where the token is empty. Also goes over connections without TLS."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def read_token(path: Path) -> str:
    """Read a token from a file that holds nothing else.

    Raises:
        UsageError: the file cannot be read, others may read it, or it holds no token.
    """
    subject, fix = f"--token-file {path}", "Write the token into it, and `chmod 600` it."
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()[: _MAX_TOKEN_BYTES + 1] if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise UsageError(subject, given=Literally(error.strerror), expected="a readable file", fix=fix) from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        given = Literally(f"mode {stat.S_IMODE(mode):o}: others may read it")
        raise UsageError(subject, given=given, expected="a file that only its owner may read", fix=fix)
    token = data.strip()
    if not token or len(data) > _MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
        given = Literally(f"{len(data)} bytes that are none")
        raise UsageError(subject, given=given, expected="one token and nothing else", fix=fix)
    return token.decode()
