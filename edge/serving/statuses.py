"""Status codes of errors in gRPC and HTTP."""

from __future__ import annotations

from typing import Final

from edge import errors

#: The name of gRPC's status code, and the HTTP status: Triton's where Triton has a similar error.
STATUSES: Final[dict[type[errors.RequestError], tuple[str, int]]] = {
    errors.InvalidRequest: ("INVALID_ARGUMENT", 400),
    errors.NotFound: ("NOT_FOUND", 404),
    errors.AlreadyThere: ("ALREADY_EXISTS", 409),
    errors.Unauthenticated: ("UNAUTHENTICATED", 401),
    errors.PermissionDenied: ("PERMISSION_DENIED", 403),
    errors.LoadFailed: ("FAILED_PRECONDITION", 400),
    errors.ModelNotReady: ("UNAVAILABLE", 503),
    errors.Overloaded: ("RESOURCE_EXHAUSTED", 429),
    errors.DeadlineExceeded: ("DEADLINE_EXCEEDED", 504),
    errors.Unsupported: ("UNIMPLEMENTED", 501),
    errors.RunnerError: ("INTERNAL", 500),
}
