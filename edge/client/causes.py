"""Likely causes of failed connections, read from gRPC's own words, and what to do about each."""

from __future__ import annotations

from typing import Final, NamedTuple

_RUNNING: Final = "Is it running? `fewheads serve REPOSITORY` starts one, --url names another."
_HTTP_PORT: Final = "That is an HTTP port; gRPC is on --grpc-port, 8001 by default."
_OTHER_NAME: Final = (
    "The server's certificate is for another name. Connect by a name that is in it, or issue one for this name."
)


class _Cause(NamedTuple):
    """A cause, known by parts of gRPC's message and by whether the client uses TLS (None: either way)."""

    words: tuple[str, ...]
    tls: bool | None
    advice: str


#: gRPC's status is UNAVAILABLE for all of these; only its message tells them apart. The first match counts.
_CAUSES: Final = (
    _Cause(
        ("failed to connect", "Socket closed"),
        False,
        "The server closed the connection at once. If it uses TLS, connect with --tls, or with --tls-ca for an "
        "authority of your own.",
    ),
    _Cause(
        ("failed to connect", "Socket closed"),
        True,
        "The server closed the connection after the TLS handshake. If it asks for client certificates, give "
        "--tls-certificate and --tls-key.",
    ),
    _Cause(
        ("Connection reset",),
        True,
        "The server ended the connection during or after the TLS handshake. If it asks for client certificates, give "
        "--tls-certificate and --tls-key.",
    ),
    _Cause(("WRONG_VERSION_NUMBER",), True, "That port does not use TLS. Leave out --tls and the other TLS options."),
    _Cause(("certificate has expired",), True, "The server's certificate, or its authority's, has expired. Renew it."),
    _Cause(("is not yet valid",), True, "The server's certificate is not valid yet. Compare the clocks of both hosts."),
    _Cause(
        ("CERTIFICATE_VERIFY_FAILED",),
        True,
        "The server's certificate is not from a trusted authority. Give the PEM file of its authority with --tls-ca.",
    ),
    _Cause(("Hostname Verification",), True, _OTHER_NAME),
    _Cause(("not in peer certificate",), True, _OTHER_NAME),  # older versions of gRPC
    _Cause(("selected ALPN",), True, _HTTP_PORT),
    _Cause(("Failed parsing HTTP/2",), None, _HTTP_PORT),
    _Cause(("Received http2 header with status",), None, "A web server or proxy answered, not a gRPC server."),
    _Cause(("Failed to parse port",), None, "Give --url as HOST:PORT, for example 127.0.0.1:8001."),
    _Cause(
        ("::1", "Connection refused"),
        None,
        "No server listens on ::1, the last address of that host. Connect to 127.0.0.1 in place of localhost, whose "
        f"answer says more. {_RUNNING}",
    ),
    _Cause((":443: ", "Connection refused"), None, f"Does --url name the port? 8001 is the default. {_RUNNING}"),
    _Cause(("errors resolving",), None, "No address is known for that host. Give --url as HOST:PORT."),
)


def advice(details: str, *, tls: bool) -> str:
    """Return what to do about a server that cannot be reached.

    Args:
        details: gRPC's message.
        tls: whether the client connects with TLS.
    """
    for cause in _CAUSES:
        if cause.tls in (None, tls) and all(words in details for words in cause.words):
            return cause.advice
    return _RUNNING
