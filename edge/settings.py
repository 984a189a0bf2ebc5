"""What ``fewheads serve`` can be told, checked all at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.errors import Literally, UsageError

#: gRPC keeps its limits in 32 bits.
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one server.

    Attributes:
        repository: the directory whose bundles are served.
        host: the address to listen on; loopback unless told otherwise.
        grpc_port: 0 lets the system choose.
        metrics_port: 0 lets the system choose; None serves no metrics.
        target: the backend, as ``fewheads build --target`` takes it.
        cache: where built models lie.
        max_message_bytes: the largest request that is read.
        max_queue_size: how many requests may wait for the device thread; one more is refused.
        drain_seconds: how long a shutdown waits for the requests that were accepted.
        strict_readiness: whether ServerReady needs every bundle of the repository to be ready, as in Triton.
    """

    repository: Path
    host: str = "127.0.0.1"
    grpc_port: int = 8001
    metrics_port: int | None = 8002
    target: str = "auto"
    cache: Path | None = None
    max_message_bytes: int = 64 * 1024**2
    max_queue_size: int = 256
    drain_seconds: float = 10.0
    strict_readiness: bool = True

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UsageError: the first one that is wrong.
        """
        if not self.repository.is_dir():
            given = Literally(f"{self.repository}, which is {'a file' if self.repository.exists() else 'not there'}")
            fix = "Make one with `fewheads export RUN --repository DIRECTORY`, or run `make demo`."
            raise UsageError("REPOSITORY", given=given, expected="a directory of bundles", fix=fix)
        ports = {"--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}
        for name, port in ports.items():
            if port is not None and not 0 <= port <= 65535:
                raise UsageError(name, given=port, expected="0 to 65535", fix="Take a free port, or 0 for any.")
        if self.grpc_port and self.grpc_port == self.metrics_port:
            fix = "Give the two different ports."
            raise UsageError("--metrics-port", given=self.metrics_port, expected="another port than gRPC's", fix=fix)
        sizes = {"--max-message-bytes": self.max_message_bytes, "--max-queue-size": self.max_queue_size}
        for name, size in sizes.items():
            if not 1 <= size <= _MAX_INT32:
                expected = f"1 to {_MAX_INT32}"
                raise UsageError(name, given=size, expected=expected, fix="Leave it out for the default.")
        if not self.drain_seconds >= 0:  # so that NaN is refused too
            raise UsageError("--drain-seconds", given=self.drain_seconds, expected="0 or more", fix="Raise it.")
