"""What ``fewheads serve`` can be told, checked all at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from edge.errors import Literally, UsageError
from edge.instruments.logs import FORMATS, LEVELS
from edge.scheduling.elastic import POLICIES
from edge.scheduling.scheduler import DEFAULT_MAX_QUEUE_BYTES
from edge.security.rate import Rate

#: gRPC keeps its limits in 32 bits.
_MAX_INT32 = 2**31 - 1
MAX_INSTANCES = 64
#: Triton's words for when models are loaded: at the start only, as the repository changes, or on request.
MODEL_CONTROL_MODES = ("none", "poll", "explicit")
#: What carries gRPC: its own library, or a leaner one.
TRANSPORTS = ("grpcio", "nghttp2")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one server.

    Attributes:
        repository: the directory whose bundles are served.
        host: the address to listen on; loopback unless told otherwise.
        grpc_port: 0 lets the system choose.
        transport: what carries gRPC, one of :data:`TRANSPORTS`.
        metrics_port: 0 lets the system choose; None serves no metrics.
        http_port: where the protocol is served over HTTP too; 0 lets the system choose, None does not serve it.
        target: the backend, as ``fewheads build --target`` takes it.
        cache: where built models lie.
        max_message_bytes: the largest request that is read.
        max_queue_size: how many requests may wait for a worker; one more is refused.
        max_queue_bytes: how many bytes their tensors may hold.
        instances: how many runs are computed at once, more than 1 only on the CPU; None is one for each core there.
        batching: whether requests may share a run.
        max_queue_delay_us: how long a request that found the server busy may wait for others to join it; None is
            what each bundle says.
        policy: which tier answers requests that name none; None is what each bundle says.
        default_timeout_ms: for requests without a deadline of their own; 0 lets them wait for ever.
        admission: whether requests that are predicted to miss their deadline are refused.
        drain_seconds: how long a shutdown waits for the requests that were accepted.
        watchdog_seconds: how long any run may take before the server is not ready, unless ten times what those of its
            size usually take is longer; infinite watches none.
        stuck_exit_seconds: how long a run that is stuck is waited for before the process ends; infinite waits for ever.
        memory_headroom_bytes: what has to stay free of the machine's memory when a model is loaded.
        strict_readiness: whether ServerReady needs every bundle of the repository to be ready, as in Triton.
        model_control: when models are loaded, one of :data:`MODEL_CONTROL_MODES`.
        poll_seconds: how often the repository is looked at, where its changes are followed.
        load_models: names of the models to load at the start, where the others are loaded on request; ``*`` is all.
        allow_shared_memory: whether clients may name shared memory objects of this host, which the server then reads
            and writes.
        max_shared_memory_bytes: how large all that clients have registered may be.
        allow_log_settings: whether clients may change what is logged.
        log_level: the least level of messages that are written.
        tls_certificate: the server's certificate in PEM, read again when it changes; None serves without TLS.
        tls_key: its private key.
        tls_client_ca: the authorities that clients' certificates must come from; None asks clients for none.
        tokens: a file of bearer tokens, as ``fewheads token`` makes them, read again when it changes; None asks
            clients for none.
        rate_limit: how often each client may ask; None lets all ask as they like.
        log_format: how they are written, a name in :data:`edge.instruments.logs.FORMATS`.
        trace_endpoint: the URL of an OpenTelemetry collector; empty traces nothing.
        trace_ratio: the share of requests that is traced, of those whose callers do not trace.
    """

    repository: Path
    host: str = "127.0.0.1"
    grpc_port: int = 8001
    transport: str = "grpcio"
    metrics_port: int | None = 8002
    http_port: int | None = None
    target: str = "auto"
    cache: Path | None = None
    max_message_bytes: int = 64 * 1024**2
    max_queue_size: int = 256
    max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES
    instances: int | None = None
    batching: bool = True
    max_queue_delay_us: int | None = None
    policy: str | None = None
    default_timeout_ms: float = 0.0
    admission: bool = True
    drain_seconds: float = 10.0
    watchdog_seconds: float = 30.0
    stuck_exit_seconds: float = 60.0
    memory_headroom_bytes: int = 256 * 1024**2
    strict_readiness: bool = True
    model_control: str = "none"
    poll_seconds: float = 15.0
    load_models: tuple[str, ...] = ()
    allow_shared_memory: bool = False
    max_shared_memory_bytes: int = 256 * 1024**2
    allow_log_settings: bool = False
    log_level: str = "info"
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    rate_limit: Rate | None = None
    log_format: str = "default"
    trace_endpoint: str = ""
    trace_ratio: float = 0.01

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UsageError: the first one that is wrong.
        """
        if not self.repository.is_dir():
            given = Literally(f"{self.repository}, which is {'a file' if self.repository.exists() else 'not there'}")
            fix = "Make one with `fewheads export RUN --repository DIRECTORY`, or run `make demo`."
            raise UsageError("REPOSITORY", given=given, expected="a directory of bundles", fix=fix)
        ports = {"--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port, "--http-port": self.http_port}
        for name, port in ports.items():
            if port is not None and not 0 <= port <= 65535:
                raise UsageError(name, given=port, expected="0 to 65535", fix="Take a free port, or 0 for any.")
        if self.grpc_port and self.grpc_port == self.metrics_port:
            fix = "Give the two different ports."
            raise UsageError("--metrics-port", given=self.metrics_port, expected="another port than gRPC's", fix=fix)
        if self.http_port and self.http_port in (self.grpc_port, self.metrics_port):
            expected, fix = "another port than gRPC's and the metrics'", "Give each its own."
            raise UsageError("--http-port", given=self.http_port, expected=expected, fix=fix)
        sizes: dict[str, tuple[float, float, float]] = {
            "--max-message-bytes": (self.max_message_bytes, 1, _MAX_INT32),
            "--max-queue-size": (self.max_queue_size, 1, _MAX_INT32),
            "--max-queue-bytes": (self.max_queue_bytes, 1, 2**63 - 1),
            "--instances": (1 if self.instances is None else self.instances, 1, MAX_INSTANCES),
            "--max-queue-delay-us": (self.max_queue_delay_us or 0, 0, 1_000_000),
            "--default-timeout-ms": (self.default_timeout_ms, 0, math.inf),
            "--watchdog-seconds": (self.watchdog_seconds, 0.1, math.inf),
            "--stuck-exit-seconds": (self.stuck_exit_seconds, 0, math.inf),
            "--memory-headroom-bytes": (self.memory_headroom_bytes, 0, 2**63 - 1),
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
        words: dict[str, tuple[str, Sequence[str]]] = {
            "--model-control": (self.model_control, MODEL_CONTROL_MODES),
            "--log-level": (self.log_level, LEVELS),
            "--transport": (self.transport, TRANSPORTS),
            "--log-format": (self.log_format, tuple(FORMATS)),
        }
        for name, (word, known) in words.items():
            if word not in known:
                expected = f"one of {', '.join(known)}"
                raise UsageError(name, given=word, expected=expected, fix="Leave it out for the default.")
        if self.trace_endpoint and not self.trace_endpoint.startswith(("http://", "https://")):
            expected = "http://HOST:PORT or https://HOST:PORT"
            fix = "Give where the collector takes OTLP over gRPC, port 4317 as a rule."
            raise UsageError("--trace-endpoint", given=self.trace_endpoint, expected=expected, fix=fix)
        if not 0 <= self.trace_ratio <= 1:
            raise UsageError("--trace-ratio", given=self.trace_ratio, expected="0 to 1", fix="1 traces all.")
        if self.load_models and self.model_control != "explicit":
            given = Literally(f"it with --model-control {self.model_control}")
            fix = "Leave it out: all models are loaded at the start."
            raise UsageError("--load-model", given=given, expected="--model-control explicit", fix=fix)
        if "*" in self.load_models and len(self.load_models) > 1:
            fix = "Give one or the other."
            raise UsageError("--load-model", given=list(self.load_models), expected="* alone, or names", fix=fix)
        self._check_transport()
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, fix = Literally("one without the other"), "Give both, or leave both out."
            raise UsageError("--tls-certificate and --tls-key", given=given, expected="both or none", fix=fix)
        if self.tls_client_ca and not self.tls_certificate:
            given, fix = Literally("it without --tls-certificate"), "Give the server a certificate too."
            raise UsageError("--tls-client-ca", given=given, expected="--tls-certificate and --tls-key", fix=fix)

    def _check_transport(self) -> None:
        if self.transport == "grpcio":
            return
        if find_spec("ngh2") is None:
            given, fix = Literally(f"{self.transport} without its library"), "Install it: pip install 'fewheads[fast]'."
            raise UsageError("--transport", given=given, expected="the package ngh2", fix=fix)

    def open_doors(self) -> list[str]:
        """Return what a stranger on the network may do with these settings; nothing where none reaches the server."""
        if _is_loopback(self.host):
            return []
        doors = []
        if not self.tokens and not self.tls_client_ca:
            fix = "--tokens, or --tls-client-ca, lets in only those who shall"
            doors.append(f"{self.host} is no loopback address, and whoever reaches it may call everything; {fix}")
        if not self.tls_certificate:
            told = "requests, answers and tokens" if self.tokens else "requests and answers"
            fix = "--tls-certificate encrypts them"
            doors.append(f"{self.host} is no loopback address, and {told} can be read on the way; {fix}")
        return doors


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
