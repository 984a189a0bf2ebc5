"""The one place where errors become status codes, of gRPC and of HTTP."""

from __future__ import annotations

from typing import Final, NamedTuple

from edge import errors
from edge.errors import RequestError


class Status(NamedTuple):
    """What a transport says of an error.

    Attributes:
        grpc: the name of gRPC's status code.
        http: HTTP's; where Triton has a like error, Triton's.
    """

    grpc: str
    http: int


STATUSES: Final[dict[type[RequestError], Status]] = {
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
