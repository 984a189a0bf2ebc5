"""gRPC's side of the server, whatever library carries it: services, statuses, authorization, limits."""
