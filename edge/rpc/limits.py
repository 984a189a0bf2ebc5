"""Connection limits of the gRPC endpoint, as gRPC's own options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: HTTP/2 counts them in 31 bits.
MAX_STREAMS: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of connections and messages.

    Attributes:
        max_message_bytes: the largest request that is read.
        max_metadata_bytes: of the headers of a call. A call of a stock client has some 300 bytes of them.
        max_connections: at once; each costs a file, of which a process has 1024 by default. More are closed.
        max_concurrent_streams: calls on one connection; more fail with UNAVAILABLE, for few clients wait for their
            turn. It should be far above what the queue holds, which refuses with a status that says more.
        handshake_seconds: until TLS and HTTP/2 have to be agreed.
        idle_seconds: a connection without a call for so long is closed; clients open it again when they need it.
        min_ping_seconds: pings that come quicker than this count as strikes. Stock clients send none unless
            configured to, and then every 10 s or so.
        max_ping_strikes: pings too many, since the server last sent something else, that end a connection.
    """

    max_message_bytes: int = 64 * 1024**2
    max_metadata_bytes: int = 8192
    max_connections: int = 512
    max_concurrent_streams: int = 4096
    handshake_seconds: float = 10.0
    idle_seconds: float = 1800.0
    min_ping_seconds: float = 1.0
    max_ping_strikes: int = 10

    def options(self) -> list[tuple[str, int]]:
        """Return them as the options of a gRPC server."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Two, because between them gRPC would refuse some calls and let others pass, by chance.
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_concurrent_streams),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_seconds * 1000)),
            ("grpc.max_connection_idle_ms", round(self.idle_seconds * 1000)),
            # Without this a client that keeps an idle connection alive would be sent away at its third ping.
            ("grpc.keepalive_permit_without_calls", 1),
            # gRPC's documents call it by the name of its constant, min_recv_ping_interval..., which does nothing.
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.min_ping_seconds * 1000)),
            ("grpc.http2.max_ping_strikes", self.max_ping_strikes),
            # Without this a second server could silently share the port.
            ("grpc.so_reuseport", 0),
        ]
