"""A client's TLS."""

from __future__ import annotations

from pathlib import Path

import grpc

from edge.errors import Raw, UsageError
from edge.security.certificates import read_certificates, read_pem


def channel_credentials(
    tls_ca: Path | None = None, tls_certificate: Path | None = None, tls_key: Path | None = None
) -> grpc.ChannelCredentials:
    """Return credentials for blocking and asyncio channels. Without ``tls_ca`` they trust the authorities of gRPC."""
    if (tls_certificate is None) != (tls_key is None):
        given = Raw("--tls-key alone" if tls_certificate is None else "--tls-certificate alone")
        fix = "Give both, or leave both out."
        raise UsageError("--tls-certificate and --tls-key", given=given, expected="both or none", fix=fix)
    roots = read_pem("--tls-ca", tls_ca) if tls_ca else None
    if tls_certificate is None or tls_key is None:
        return grpc.ssl_channel_credentials(roots)
    own = read_certificates(tls_certificate, tls_key, None)
    return grpc.ssl_channel_credentials(roots, own.key, own.chain)
