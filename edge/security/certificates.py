"""TLS certificate, key and client authorities of the server: PEM files, checked."""

from __future__ import annotations

import logging
import math
import os
import re
import ssl
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from edge.errors import Raw, UsageError
from edge.security.watched import Watched, read_limited

log = logging.getLogger(__name__)

_MAX_PEM_BYTES = 1024**2
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_WARN_SECONDS = 14 * 86400.0
#: OpenSSL's codes of errors with which a certificate is served nevertheless.
_FAULTS = {9: "is not valid yet; is the clock right?", 10: "has expired"}


@dataclass(frozen=True)
class Certificates:
    """PEM data for TLS."""

    chain: bytes  # the server's certificate, then any intermediate ones
    key: bytes = field(repr=False)
    client_ca: bytes | None  # authorities of client certificates; None requests none from clients

    def problem(self) -> str:
        """Return the current fault of a certificate that is served nevertheless, such as its expiry; empty if none."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_pair(server, self.chain, self.key)
        expires, fault = _validity(server, self.chain)
        seconds = expires - time.time()
        if not fault and seconds < _WARN_SECONDS:
            fault = f"expires in {seconds / 86400:.1f} days"
        return f"the TLS certificate {fault}" if fault else ""

    @cached_property
    def http(self) -> ssl.SSLContext:
        """TLS context of HTTP/1.1 servers."""
        return self._context()

    @cached_property
    def http2(self) -> ssl.SSLContext:
        """TLS context of HTTP/2 servers."""
        context = self._context()
        context.set_alpn_protocols(["h2"])
        return context

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_pair(context, self.chain, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


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


def read_certificates(chain: Path, key: Path, client_ca: Path | None) -> Certificates:
    """Read and check the files of :class:`Certificates`. Faults that do not prevent TLS are logged as warnings."""
    chain_pem, key_pem = read_pem("--tls-certificate", chain), read_pem("--tls-key", key)
    if stat.S_IMODE(os.stat(key).st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("--tls-key %s: users other than its owner may read it; run chmod 600", key)
    try:
        _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain_pem, key_pem)
    except (ssl.SSLError, ValueError) as error:
        raise _wrong_pair(chain, key, error) from None
    ca_pem = None if client_ca is None else read_pem("--tls-client-ca", client_ca)
    try:
        if ca_pem is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=ca_pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        given, fix = Raw("something else"), "Give the certificate of the clients' authority, without its key."
        raise UsageError(f"--tls-client-ca {client_ca}", given=given, expected="PEM certificates", fix=fix) from None
    certificates = Certificates(chain_pem, key_pem, ca_pem)
    if problem := certificates.problem():
        log.warning("--tls-certificate %s: %s", chain, problem)
    return certificates


def read_pem(option: str, path: Path) -> bytes:
    """Return the blocks of the PEM file that an option names, without the text around them."""
    fix = "Give the path of the file, and let this process's user read it."
    data, _ = read_limited(f"{option} {path}", path, _MAX_PEM_BYTES, fix)
    # Comments may have any encoding, of which Python's ssl takes only ASCII.
    blocks = [block[0] + b"\n" for block in _BLOCK.finditer(data or b"")]
    if not blocks:
        given, expected = Raw(f"{path}, which has no PEM block"), "a file of PEM blocks, at most 1 MiB"
        fix = "Convert the binary form with `openssl x509 -inform DER` or `openssl pkcs8 -inform DER -nocrypt`."
        raise UsageError(option, given=given, expected=expected, fix=fix)
    return b"".join(blocks)


def _load_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Load a pair from memory, so that exactly the checked bytes are used; ``ssl`` loads only files."""
    files = [os.memfd_create(name) for name in ("certificate", "key")]
    try:
        for file, data in zip(files, (chain, key), strict=True):
            os.write(file, data)
        chain_path, key_path = (f"/proc/self/fd/{file}" for file in files)
        # Without a password, OpenSSL would prompt for the passphrase at the terminal.
        context.load_cert_chain(chain_path, key_path, password="")
    finally:
        for file in files:
            os.close(file)


def _wrong_pair(chain: Path, key: Path, error: Exception) -> UsageError:
    reason = getattr(error, "reason", "") or ""
    if "MISMATCH" in reason:
        given, fix = Raw(f"{key}, of another certificate"), f"Give the key that {chain} was made for."
        return UsageError("--tls-key", given=given, expected=f"the key of {chain}", fix=fix)
    given = Raw(f"{chain} and {key}: {reason.replace('_', ' ').lower() or 'unreadable'}")
    fix = "Use a key without a passphrase, and a file whose first certificate is the server's."
    subject, expected = "--tls-certificate and --tls-key", "a certificate and its private key"
    return UsageError(subject, given=given, expected=expected, fix=fix)


def _validity(server: ssl.SSLContext, chain: bytes) -> tuple[float, str]:
    """Return the end of a certificate's validity, as a POSIX time, and its current fault."""
    # Python's ssl shows only a peer's certificate, so a client in memory that trusts it alone shakes hands with it.
    first = chain.decode("ascii", "ignore").partition("-----END CERTIFICATE-----")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be self-signed
    client.load_verify_locations(cadata="".join(first[:2]))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    try:
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):  # it waits for the other end
                end.do_handshake()
        peer = ends[0].getpeercert()
    except ssl.SSLCertVerificationError as error:
        return math.inf, _FAULTS.get(error.verify_code, f"would be rejected: {error.verify_message}")
    except ssl.SSLError as error:
        return math.inf, f"would be rejected: {error.reason}"
    end_date = peer.get("notAfter") if peer else None
    return (ssl.cert_time_to_seconds(str(end_date)) if end_date else math.inf), ""
