"""Limits of the gRPC endpoint: connections, calls and messages, also as gRPC's own options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edge.protocol import HEALTH, INFERENCE, REFLECTION, TELEMETRY

#: HTTP/2 counts streams in 31 bits.
MAX_STREAMS: Final = 2**31 - 1
#: Calls on one connection of grpcio, which takes about 14 KiB and 80 µs of the event loop for each before its request
#: arrives, and does not say what it holds. Its clients wait where they have more. Thirty connections full of calls
#: that do not end make others wait for up to 0.7 s where each may have 256, and for up to 0.2 s with 128.
_GRPCIO_STREAMS: Final = 128
#: Requests of services that need no token, or carry names alone.
_SERVICE_BYTES: Final = {
    HEALTH: 4 * 1024,
    REFLECTION: 4 * 1024,
    TELEMETRY: 4 * 1024,
    INFERENCE: 64 * 1024,
}
#: Requests that may be larger: those with tensors, up to ``max_message_bytes``, and a load with its parameters.
_TENSOR_METHODS: Final = (f"/{INFERENCE}/ModelInfer", f"/{INFERENCE}/ModelStreamInfer")
_METHOD_BYTES: Final = {f"/{INFERENCE}/RepositoryModelLoad": 1024**2}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of connections and messages."""

    max_message_bytes: int = 64 * 1024**2  # of a request with tensors
    max_metadata_bytes: int = 8192  # headers of a call; a stock client sends about 300 bytes
    max_connections: int = 512  # further ones are closed
    # Calls on one connection; further ones are UNAVAILABLE. The queue, far smaller, refuses with a specific status.
    max_concurrent_streams: int = 4096
    max_calls: int = 16384  # on all connections of grpcio
    handshake_seconds: float = 10.0  # of TLS and HTTP/2
    idle_seconds: float = 1800.0  # a connection without calls closes after this time
    min_ping_seconds: float = 1.0  # faster pings are strikes; stock clients send one every 10 s, if configured
    max_ping_strikes: int = 10  # more since the server last sent data or headers end the connection

    def max_request_bytes(self, path: str) -> int:
        """Return the limit for a request of the method with this path."""
        if path in _TENSOR_METHODS:
            return self.max_message_bytes
        service = path[1:].partition("/")[0]
        return min(
            _METHOD_BYTES.get(path) or _SERVICE_BYTES.get(service, self.max_message_bytes), self.max_message_bytes
        )

    def options(self) -> list[tuple[str, int]]:
        """Return the options of a gRPC server."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # The server decompresses messages itself, up to the limit of their method.
            ("grpc.per_message_decompression", 0),
            # Both, because between the soft and the hard limit gRPC refuses calls at random.
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", min(self.max_concurrent_streams, _GRPCIO_STREAMS)),
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
