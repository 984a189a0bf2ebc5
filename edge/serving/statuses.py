"""Status codes of errors in gRPC and HTTP."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from edge import errors


class Code(IntEnum):
    """gRPC's status codes, without grpcio, which takes 16 MB."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class ErrorStatus(NamedTuple):
    """gRPC's status code, and the HTTP status: Triton's where Triton has a similar error."""

    grpc: Code
    http: int


STATUSES: Final[dict[type[errors.RequestError], ErrorStatus]] = {
    errors.InvalidRequest: ErrorStatus(Code.INVALID_ARGUMENT, 400),
    errors.NotFound: ErrorStatus(Code.NOT_FOUND, 404),
    errors.AlreadyThere: ErrorStatus(Code.ALREADY_EXISTS, 409),
    errors.Unauthenticated: ErrorStatus(Code.UNAUTHENTICATED, 401),
    errors.PermissionDenied: ErrorStatus(Code.PERMISSION_DENIED, 403),
    errors.LoadFailed: ErrorStatus(Code.FAILED_PRECONDITION, 400),
    errors.ModelNotReady: ErrorStatus(Code.UNAVAILABLE, 503),
    errors.Overloaded: ErrorStatus(Code.RESOURCE_EXHAUSTED, 429),
    errors.DeadlineExceeded: ErrorStatus(Code.DEADLINE_EXCEEDED, 504),
    errors.Unsupported: ErrorStatus(Code.UNIMPLEMENTED, 501),
    errors.RunnerError: ErrorStatus(Code.INTERNAL, 500),
}
