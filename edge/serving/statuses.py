"""Status codes of errors in gRPC and HTTP."""

from __future__ import annotations

from typing import Final, NamedTuple

from edge import errors


class Status(NamedTuple):
    """The name of gRPC's status code, and the HTTP status: Triton's where Triton has a similar error."""

    grpc: str
    http: int


STATUSES: Final[dict[type[errors.RequestError], Status]] = {
    errors.InvalidRequest: Status("INVALID_ARGUMENT", 400),
    errors.NotFound: Status("NOT_FOUND", 404),
    errors.AlreadyThere: Status("ALREADY_EXISTS", 409),
    errors.Unauthenticated: Status("UNAUTHENTICATED", 401),
    errors.PermissionDenied: Status("PERMISSION_DENIED", 403),
    errors.LoadFailed: Status("FAILED_PRECONDITION", 400),
    errors.ModelNotReady: Status("UNAVAILABLE", 503),
    errors.Overloaded: Status("RESOURCE_EXHAUSTED", 429),
    errors.DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
    errors.Unsupported: Status("UNIMPLEMENTED", 501),
    errors.RunnerError: Status("INTERNAL", 500),
}
