"""The certificate that the server shows, its key, and the authorities whose clients it lets in: PEM files, checked."""

from __future__ import annotations

import logging
import math
import os
import ssl
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from edge.errors import Literally, UsageError

log = logging.getLogger(__name__)

_MAX_PEM_BYTES = 1024**2
_SOON_SECONDS = 14 * 86400.0
#: OpenSSL's numbers of two faults that a certificate may have and be served still.
_NOT_YET_VALID, _EXPIRED = 9, 10


@dataclass(frozen=True)
class Certificates:
    """What TLS needs, as PEM.

    Attributes:
        chain: the server's certificate, and those between it and its authority.
        key: its private key.
        client_ca: the authorities that clients' certificates must come from; None asks clients for none.
    """

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None

    def problem(self) -> str:
        """Return what is wrong with the certificate now, although it is served; empty if nothing is."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_pair(server, self.chain, self.key)
        expires, fault = _validity(server, self.chain)
        seconds = math.inf if expires is None else expires - time.time()
        if not fault and seconds < _SOON_SECONDS:
            fault = f"expires in {seconds / 86400:.1f} days"
        return f"the TLS certificate {fault}" if fault else ""

    @cached_property
    def http(self) -> ssl.SSLContext:
        """The same for servers of HTTP that use Python's TLS."""
        return self._context()

    @cached_property
    def http2(self) -> ssl.SSLContext:
        """The same for those of HTTP/2."""
        context = self._context()
        context.set_alpn_protocols(["h2"])
        return context

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_pair(context, self.chain, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def read_certificates(chain: Path, key: Path, client_ca: Path | None) -> Certificates:
    """Read and check the files. What is doubtful, and no error, is logged as a warning.

    Args:
        chain: the server's certificate first.
        key: without a passphrase.
        client_ca: None asks clients for no certificate.

    Raises:
        UsageError: a file is missing or no PEM, or the key is another certificate's.
    """
    chain_pem, key_pem = read_pem("--tls-certificate", chain), read_pem("--tls-key", key)
    if stat.S_IMODE(os.stat(key).st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("--tls-key %s: others than its owner may read it; chmod 600 closes it", key)
    try:
        _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain_pem, key_pem)
    except (ssl.SSLError, ValueError) as error:
        raise _wrong_pair(chain, key, error) from None
    ca_pem = None if client_ca is None else read_pem("--tls-client-ca", client_ca)
    if ca_pem is not None:
        _check_authorities(f"--tls-client-ca {client_ca}", ca_pem)
    certificates = Certificates(chain_pem, key_pem, ca_pem)
    if problem := certificates.problem():
        log.warning("--tls-certificate %s: %s", chain, problem)
    return certificates


def read_pem(option: str, path: Path) -> bytes:
    """Return what a PEM file holds.

    Args:
        option: how errors call it.
        path: where it is; links are followed.

    Raises:
        UsageError: it cannot be read, or is no PEM.
    """
    try:
        # A pipe would wait for its other end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_PEM_BYTES + 1) if regular else b""
    except OSError as error:
        given = Literally(f"{path}: {error.strerror}")
        fix = "Give the path of the file, and let the server's user read it."
        raise UsageError(option, given=given, expected="a PEM file", fix=fix) from None
    if not regular or len(data) > _MAX_PEM_BYTES or b"-----BEGIN " not in data:
        given = Literally(f"{path}, which holds none")
        fix = "Convert it: `openssl x509 -inform DER` and `openssl pkcs8 -inform DER -nocrypt` read the binary form."
        raise UsageError(option, given=given, expected="a file of PEM blocks, at most 1 MiB", fix=fix)
    return data


def _load_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Load a pair that is in memory, so that what was checked is what is used; Python's TLS takes only files."""
    files = [os.memfd_create(name) for name in ("certificate", "key")]
    try:
        for file, data in zip(files, (chain, key), strict=True):
            os.write(file, data)
        chain_path, key_path = (f"/proc/self/fd/{file}" for file in files)
        # An empty passphrase in place of a question at the terminal.
        context.load_cert_chain(chain_path, key_path, password=lambda: "")
    finally:
        for file in files:
            os.close(file)


def _wrong_pair(chain: Path, key: Path, error: Exception) -> UsageError:
    reason = getattr(error, "reason", "") or ""
    if "MISMATCH" in reason:
        fix = f"Give the key that {chain} was made for."
        return UsageError(
            "--tls-key", given=Literally(f"{key}, of another certificate"), expected=f"the key of {chain}", fix=fix
        )
    given = Literally(f"{chain} and {key}: {reason.replace('_', ' ').lower() or 'unreadable'}")
    fix = "Take a key without a passphrase, and the server's certificate as the first of its file."
    return UsageError(
        "--tls-certificate and --tls-key", given=given, expected="a certificate and its private key", fix=fix
    )


def _check_authorities(subject: str, pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode())
    except (ssl.SSLError, ValueError):
        fix = "Give the certificate of the authority that issues those of the clients, without its key."
        raise UsageError(subject, given=Literally("what is none"), expected="certificates in PEM", fix=fix) from None


def _validity(server: ssl.SSLContext, chain: bytes) -> tuple[float | None, str]:
    """Return until when a certificate is valid, and what is wrong with it now.

    A client in memory, which trusts just this certificate, shakes hands with the server: the standard library tells
    the dates of no other certificate than that of a peer.
    """
    first = chain.decode(errors="replace").partition("-----END CERTIFICATE-----")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its authority need not be known
    client.load_verify_locations(cadata="".join(first[:2]))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    try:
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):  # until the other end has said more
                end.do_handshake()
        peer = ends[0].getpeercert()
    except ssl.SSLCertVerificationError as error:
        known = {_NOT_YET_VALID: "is not valid yet; is the clock right?", _EXPIRED: "has expired"}
        return None, known.get(error.verify_code, f"would be refused: {error.verify_message}")
    except ssl.SSLError as error:
        return None, f"would be refused: {error.reason}"
    end_date = peer.get("notAfter") if peer else None
    return (ssl.cert_time_to_seconds(str(end_date)), "") if end_date else (None, "")
