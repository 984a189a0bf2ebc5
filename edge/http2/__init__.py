"""gRPC over nghttp2, the faster transport: the same servicers as on grpcio, on HTTP/2 by a hardened C library."""
