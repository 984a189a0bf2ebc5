"""gRPC over its own library, the default transport."""
