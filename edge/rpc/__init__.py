"""The gRPC services of every transport, with their statuses, authorization and limits."""
