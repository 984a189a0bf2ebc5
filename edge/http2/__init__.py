"""gRPC on nghttp2, the faster transport: the same servicers as on grpcio, on a C library for HTTP/2."""
