"""Likely causes of failed connections, read from gRPC's own words, and what to do about each."""

from __future__ import annotations

from typing import Final, NamedTuple

_TLS_OPTIONS = "--tls, or --tls-ca for an authority of your own"
_RUNNING: Final = "Is it running? `fewheads serve REPOSITORY` starts one, --url names another."


class _Cause(NamedTuple):
    """One cause: all of ``words`` are in gRPC's message, and the client uses TLS or not (None: either)."""

    words: tuple[str, ...]
    tls: bool | None
    advice: str


#: gRPC tells these failures apart in its message only; its status is UNAVAILABLE for all of them. First match wins.
_CAUSES: Final = (
    _Cause(
        ("failed to connect", "Socket closed"),
        False,
        f"The server closed the connection at once. If it uses TLS, connect with {_TLS_OPTIONS}.",
    ),
    _Cause(
        ("failed to connect", "Socket closed"),
        True,
        "The server closed the connection after the TLS handshake. If it asks for client certificates, give "
        "--tls-certificate and --tls-key.",
    ),
    _Cause(
        ("WRONG_VERSION_NUMBER",), True, "That port does not use TLS. Leave out --tls, --tls-ca and --tls-certificate."
    ),
    _Cause(
        ("certificate has expired",), True, "The server's certificate has expired, or one of its authority. Renew it."
    ),
    _Cause(
        ("is not yet valid",), True, "The server's certificate is not valid yet. Compare the clocks of both machines."
    ),
    _Cause(
        ("CERTIFICATE_VERIFY_FAILED",),
        True,
        "The server's certificate is not from a trusted authority. Give the PEM file of its authority with --tls-ca.",
    ),
    _Cause(
        ("not in peer certificate",),
        True,
        "The server's certificate is for another name. Connect by a name in it, or issue one for this name.",
    ),
    _Cause(("ALPN",), True, "That is an HTTP port; gRPC is on --grpc-port, 8001 by default."),
    _Cause(("Failed parsing HTTP/2",), None, "That is an HTTP port; gRPC is on --grpc-port, 8001 by default."),
    _Cause(
        ("Received http2 header with status",), None, "That is a web server; gRPC is on --grpc-port, 8001 by default."
    ),
    _Cause(("Failed to parse port",), None, "Give --url as HOST:PORT, for example 127.0.0.1:8001."),
    _Cause((":443: ", "Connection refused"), None, "Does --url name the port? 8001 is the default. " + _RUNNING),
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
