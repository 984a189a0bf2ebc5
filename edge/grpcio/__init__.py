"""gRPC on grpcio, the transport for installations without nghttp2."""
