"""What ``fewheads serve`` can be told, checked all at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from edge.elastic import POLICIES
from edge.errors import Literally, UsageError
from edge.logs import LEVELS
from edge.scheduler import DEFAULT_MAX_QUEUE_BYTES

#: gRPC keeps its limits in 32 bits.
_MAX_INT32 = 2**31 - 1
_MAX_INSTANCES = 64
#: Triton's words for when models are loaded: at the start only, as the repository changes, or on request.
MODEL_CONTROL_MODES = ("none", "poll", "explicit")


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
        max_queue_size: how many requests may wait for a worker; one more is refused.
        max_queue_bytes: how many bytes their tensors may hold.
        instances: worker threads, each with its own copy of every model; more than 1 only on the CPU.
        batching: whether requests may share a run.
        max_queue_delay_us: how long a request that found the server busy may wait for others to join it; None is
            what each bundle says.
        policy: which tier answers requests that name none; None is what each bundle says.
        default_timeout_ms: for requests without a deadline of their own; 0 lets them wait for ever.
        admission: whether requests that are predicted to miss their deadline are refused.
        drain_seconds: how long a shutdown waits for the requests that were accepted.
        strict_readiness: whether ServerReady needs every bundle of the repository to be ready, as in Triton.
        model_control: when models are loaded, one of :data:`MODEL_CONTROL_MODES`.
        poll_seconds: how often the repository is looked at, where its changes are followed.
        load_models: names of the models to load at the start, where the others are loaded on request; ``*`` is all.
        allow_shared_memory: whether clients may name shared memory objects of this host, which the server then reads
            and writes.
        max_shared_memory_bytes: how large all that clients have registered may be.
        log_level: the least level of messages that are written.
    """

    repository: Path
    host: str = "127.0.0.1"
    grpc_port: int = 8001
    metrics_port: int | None = 8002
    target: str = "auto"
    cache: Path | None = None
    max_message_bytes: int = 64 * 1024**2
    max_queue_size: int = 256
    max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES
    instances: int = 1
    batching: bool = True
    max_queue_delay_us: int | None = None
    policy: str | None = None
    default_timeout_ms: float = 0.0
    admission: bool = True
    drain_seconds: float = 10.0
    strict_readiness: bool = True
    model_control: str = "none"
    poll_seconds: float = 15.0
    load_models: tuple[str, ...] = ()
    allow_shared_memory: bool = False
    max_shared_memory_bytes: int = 256 * 1024**2
    log_level: str = "info"

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
        sizes: dict[str, tuple[float, float, float]] = {
            "--max-message-bytes": (self.max_message_bytes, 1, _MAX_INT32),
            "--max-queue-size": (self.max_queue_size, 1, _MAX_INT32),
            "--max-queue-bytes": (self.max_queue_bytes, 1, 2**63 - 1),
            "--instances": (self.instances, 1, _MAX_INSTANCES),
            "--max-queue-delay-us": (self.max_queue_delay_us or 0, 0, 1_000_000),
            "--default-timeout-ms": (self.default_timeout_ms, 0, math.inf),
            "--poll-seconds": (self.poll_seconds, 0.1, 86400),
            "--max-shared-memory-bytes": (self.max_shared_memory_bytes, 1, 2**63 - 1),
        }
        for name, (size, least, most) in sizes.items():
            if not least <= size <= most:  # so that NaN is refused too
                expected = f"{least} to {most}"
                raise UsageError(name, given=size, expected=expected, fix="Leave it out for the default.")
        if self.policy is not None and self.policy not in POLICIES:
            fix = "Leave it out for what each bundle says."
            raise UsageError("--policy", given=self.policy, expected=f"one of {', '.join(POLICIES)}", fix=fix)
        if not self.drain_seconds >= 0:  # so that NaN is refused too
            raise UsageError("--drain-seconds", given=self.drain_seconds, expected="0 or more", fix="Raise it.")
        words = {"--model-control": (self.model_control, MODEL_CONTROL_MODES), "--log-level": (self.log_level, LEVELS)}
        for name, (word, known) in words.items():
            if word not in known:
                expected = f"one of {', '.join(known)}"
                raise UsageError(name, given=word, expected=expected, fix="Leave it out for the default.")
        if self.load_models and self.model_control != "explicit":
            given = Literally(f"it with --model-control {self.model_control}")
            fix = "Leave it out: all models are loaded at the start."
            raise UsageError("--load-model", given=given, expected="--model-control explicit", fix=fix)
        if "*" in self.load_models and len(self.load_models) > 1:
            fix = "Give one or the other."
            raise UsageError("--load-model", given=list(self.load_models), expected="* alone, or names", fix=fix)
