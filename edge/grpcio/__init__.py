"""The protocol over gRPC's own library."""
