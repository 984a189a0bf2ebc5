"""One connection of a client, blocking or asyncio: how it is made, and what goes along with each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2_grpc
from edge.security.credentials import call_metadata

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A server that is back is found soon; gRPC would wait for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # How long a connection may take to be made, in spite of its name. A board without power answers nothing; there is
    # time for one lost packet.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # When something is sent again is decided by edge.client.retries, not by whoever runs the name server.
    ("grpc.service_config_disable_resolution", 1),
)
_TELEMETRY = ("Get", "Watch")
_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a client shows to its servers, and what it believes of them. No secret is in its ``repr``.

    Attributes:
        tls: as :func:`edge.security.credentials.channel_credentials` makes it; None is a connection without TLS.
        token: is sent with each call; empty sends none. Without TLS, whoever is on the way can read it.
    """

    tls: grpc.ChannelCredentials | None = field(default=None, repr=False)
    token: str = field(default="", repr=False)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes along with each call."""
        return call_metadata(self.token)


def open_channel(
    server: str,
    credentials: Credentials | None,
    transport: Any,
    options: Sequence[tuple[str, int]] = CHANNEL_OPTIONS,
) -> Any:
    """Return a channel to a server; ``transport`` is :mod:`grpc` or :mod:`grpc.aio`."""
    if credentials and credentials.tls:
        return transport.secure_channel(server, credentials.tls, options=options)
    return transport.insecure_channel(server, options=options)


class Connection:
    """A connection to one server.

    Args:
        server: ``host:port``.
        credentials: None shows nothing, without TLS.
        transport: :mod:`grpc`, or :mod:`grpc.aio`.

    Attributes:
        channel: of gRPC.
    """

    def __init__(self, server: str, credentials: Credentials | None, transport: Any) -> None:
        self.channel = open_channel(server, credentials, transport)
        self._metadata = credentials.metadata() if credentials else ()
        self._inference = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._telemetry = telemetry_pb2_grpc.TelemetryStub(self.channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any, timeout_seconds: float | None) -> Any:
        """Call an RPC by the name that its ``.proto`` gives it; blocks, or is to be awaited, or iterated over."""
        stub = self._telemetry if method in _TELEMETRY else self._inference
        return getattr(stub, method)(request, timeout=timeout_seconds, metadata=self._metadata)

    def when_it_stands(self, then: Callable[[], None]) -> None:
        """Call ``then``, on a thread of gRPC's or in the event loop, once the server answers anything at all.

        After half a minute without an answer it is called too, and when the channel is closed.
        """
        live = self._inference.ServerLive
        live = getattr(live, "future", live)  # blocking stubs have it; those of asyncio do not wait anyway
        call = live(pb.ServerLiveRequest(), timeout=_PATIENCE_SECONDS, wait_for_ready=True, metadata=self._metadata)
        call.add_done_callback(lambda _: then())
