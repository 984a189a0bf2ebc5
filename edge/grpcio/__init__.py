"""gRPC over its own library: the transport where nghttp2 is not installed."""
