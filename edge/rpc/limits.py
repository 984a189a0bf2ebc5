"""Connection limits of the gRPC endpoint, as gRPC's own options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: HTTP/2 counts streams in 31 bits.
MAX_STREAMS: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of connections and messages.

    Attributes:
        max_message_bytes: size of a request.
        max_metadata_bytes: size of the headers of a call. A stock client sends about 300 bytes.
        max_connections: open connections; further ones are closed. Each uses a file, of which a process has 1024 by
            default.
        max_concurrent_streams: calls on one connection; further ones fail with UNAVAILABLE. It should be far above the
            size of the queue, which refuses requests with a more specific status.
        handshake_seconds: duration of the handshakes of TLS and HTTP/2.
        idle_seconds: a connection without calls closes after this time; clients reconnect when they need to.
        min_ping_seconds: faster pings count as strikes. Stock clients send pings only if configured, about every 10 s.
        max_ping_strikes: more strikes since the server last sent data or headers end the connection.
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
        """Return the options of a gRPC server."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Both, because between the soft and the hard limit gRPC refuses calls at random.
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_concurrent_streams),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_seconds * 1000)),
            ("grpc.max_connection_idle_ms", round(self.idle_seconds * 1000)),
            # Without this, gRPC closes an idle connection at the third keepalive ping.
            ("grpc.keepalive_permit_without_calls", 1),
            # The name in gRPC's documents, min_recv_ping_interval..., has no effect.
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.min_ping_seconds * 1000)),
            ("grpc.http2.max_ping_strikes", self.max_ping_strikes),
            # Without this, a second server could share the port unnoticed.
            ("grpc.so_reuseport", 0),
        ]
