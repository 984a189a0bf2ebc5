"""Connections of a client to one server, blocking or asyncio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from edge.errors import Raw, UsageError
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2_grpc
from edge.security.certificates import read_certificates, read_pem

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC's default is up to two minutes, too long for a server that has restarted.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # In spite of its name, the time limit of a connection attempt. A board without power answers nothing; two seconds
    # allow for one lost packet.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # edge.client.retries decides about retries, not a service config from the name server.
    ("grpc.service_config_disable_resolution", 1),
)
_PATIENCE_SECONDS = 30.0
#: Schemes that gRPC does not know. Its own, such as dns: and unix:, stay possible.
_SCHEMES: Final = ("http", "https", "grpc", "grpcs", "tcp")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """TLS settings and token of a client. Its ``repr`` holds no secret.

    Attributes:
        tls: from :func:`channel_credentials`; None connects without TLS.
        token: sent with each call; empty sends none. Without TLS it can be read on the network.
    """

    tls: grpc.ChannelCredentials | None = field(default=None, repr=False)
    token: str = field(default="", repr=False)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def open_channel(
    server: str, credentials: Credentials | None, transport: Any, options: Sequence[tuple[str, int]] = CHANNEL_OPTIONS
) -> Any:
    """Return a channel of ``transport``, :mod:`grpc` or :mod:`grpc.aio`; raise a UsageError for a URL with a scheme."""
    scheme, separator, address = server.partition("://")
    if separator and scheme.lower() in _SCHEMES:
        address = address.rstrip("/")
        tls = " TLS is an option of its own: --tls." if scheme.lower() in ("https", "grpcs") else ""
        raise UsageError("url", given=server, expected="HOST:PORT without a scheme", fix=f"Give {address}.{tls}")
    if credentials and credentials.tls:
        return transport.secure_channel(server, credentials.tls, options=options)
    return transport.insecure_channel(server, options=options)


class ServerConnection:
    """A channel to one server; arguments as for :func:`open_channel`."""

    def __init__(self, server: str, credentials: Credentials | None, transport: Any) -> None:
        self.channel = open_channel(server, credentials, transport)
        self._metadata = credentials.metadata() if credentials else ()
        self._inference = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._telemetry = telemetry_pb2_grpc.TelemetryStub(self.channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any, timeout_seconds: float | None) -> Any:
        """Call an RPC by its name; depending on RPC and transport, return an answer, an awaitable or an iterator."""
        stub = self._telemetry if method in ("Get", "Watch") else self._inference
        return getattr(stub, method)(request, timeout=timeout_seconds, metadata=self._metadata)

    def when_connected(self, then: Callable[[], None]) -> None:
        """Call ``then``, on a thread of gRPC's or in the event loop, once the server answers.

        It is also called after half a minute without an answer, and when the channel is closed.
        """
        live = self._inference.ServerLive
        live = getattr(live, "future", live)  # blocking stubs have a future; asyncio's do not block
        call = live(pb.ServerLiveRequest(), timeout=_PATIENCE_SECONDS, wait_for_ready=True, metadata=self._metadata)
        call.add_done_callback(lambda _: then())


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
    client = read_certificates(tls_certificate, tls_key, None)
    return grpc.ssl_channel_credentials(roots, client.key, client.chain)
