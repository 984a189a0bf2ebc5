"""Settings of ``fewheads serve``, each declared once: type, default, help, bounds and choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from edge.errors import Raw, UsageError
from edge.page_settings import Declaration, PageSettings, declarations_of, port_setting, setting
from edge.scheduling.scheduler import DEFAULT_MAX_QUEUE_BYTES
from edge.scheduling.tier_selection import POLICIES
from edge.security.rate import Rate, parse_rate

#: When models are loaded: at the start only, as the repository changes, when a client says so, or at the first request.
#: The first three are Triton's names.
MODEL_CONTROL_MODES = ("none", "poll", "explicit", "on-demand")
#: The libraries that can carry gRPC.
TRANSPORTS = ("grpcio", "nghttp2")
#: The version of ngh2 that the extra ``fast`` installs. Its API still changes between releases.
NGH2_VERSION = "0.3.0"
MAX_INSTANCES = 64

_MAX_INT32 = 2**31 - 1  # gRPC stores its limits in 32 bits
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Settings(PageSettings):
    """The settings of one server; a UsageError lists all that are wrong."""

    repository: Path = field(
        metadata={"declaration": Declaration(help="Directory of the bundles to serve.", option="REPOSITORY")}
    )
    grpc_port: int = port_setting(8001, "Port of gRPC; 0 takes any free one.")
    grpc_socket: Path | None = setting(
        None,
        "Unix socket of gRPC, instead of its port; only the user and the group of the server may connect.",
        unset="none",
    )
    transport: str = setting(
        "auto",
        "Library of gRPC. nghttp2 is faster, counts what clients make it hold, and needs "
        "`pip install 'fewheads[fast]'`; auto takes it where installed.",
        choices=("auto", *TRANSPORTS),
    )
    http_port: int | None = port_setting(None, "Port of the same over HTTP; 0 takes any free one.", unset="none")
    http_socket: Path | None = setting(None, "Unix socket of the same, as --grpc-socket.", unset="none")
    target: str = setting("auto", "Runtime, as in `fewheads build --target`.")
    cache: Path | None = setting(
        None, "Directory of built models.", unset="~/.cache/fewheads", variable="FEWHEADS_CACHE"
    )
    build: bool = setting(True, "Build models for their runtime where the cache has no build.")
    max_message_bytes: int = setting(64 * 1024**2, "Size limit of a request.", least=1, most=_MAX_INT32)
    max_queue_size: int = setting(256, "Requests that may wait; others are refused.", least=1, most=_MAX_INT32)
    max_queue_bytes: int = setting(
        DEFAULT_MAX_QUEUE_BYTES, "Total size of the tensors of waiting requests.", least=1, most=_MAX_INT64
    )
    cache_mib: int | None = setting(
        None,
        "Limit, all models together, on the keys and values of the tokens that texts in progress and waiting may have; "
        "requests beyond it are refused.",
        least=1,
        most=_MAX_INT32,
        unset="none",
    )
    instances: int | None = setting(
        None, "Runs in parallel.", least=1, most=MAX_INSTANCES, unset="the number of cores on a CPU, 1 on a GPU"
    )
    batching: bool = setting(True, "Let waiting requests share runs.")
    max_queue_delay_us: int | None = setting(
        None, "Longest wait for others to share a run.", least=0, most=1_000_000, unset="as each bundle says"
    )
    policy: str | None = setting(
        None, "Choice of the tier for requests that name none.", choices=POLICIES, unset="as each bundle says"
    )
    default_timeout_ms: float = setting(0.0, "Timeout of requests without a deadline; 0 is none.", least=0)
    admission: bool = setting(True, "Refuse requests at once that are predicted to miss their deadline.")
    drain_seconds: float = setting(10.0, "Time for which a shutdown waits for requests.", least=0, fix="Raise it.")
    watchdog_seconds: float = setting(
        30.0,
        "A run that takes longer, and ten times longer than usual, makes the server unready; inf turns this off.",
        least=0.1,
    )
    stuck_exit_seconds: float = setting(60.0, "Time until such a run ends the server with code 9; inf never.", least=0)
    memory_headroom_bytes: int = setting(
        256 * 1024**2, "Load no model that would leave less free memory.", least=0, most=_MAX_INT64
    )
    strict_readiness: bool = setting(True, "The server is ready only while every bundle is.")
    model_control: str = setting(
        "none",
        "Load models at the start only, also as REPOSITORY changes, when a client says so, or at their first request, "
        "when the least recently used ones leave where there is no room.",
        choices=MODEL_CONTROL_MODES,
    )
    poll_seconds: float = setting(15.0, "Time between two checks of REPOSITORY by poll.", least=0.1, most=86400)
    load_models: tuple[str, ...] = setting(
        (),
        "With --model-control explicit: load this model at the start; may be repeated, * is all.",
        unset="none",
        option="--load-model",
        metavar="NAME",
    )
    pinned: tuple[str, ...] = setting(
        (),
        "With --model-control on-demand: load this model at the start, and keep it; may be repeated.",
        unset="none",
        option="--pin",
        metavar="NAME",
    )
    max_loaded: int | None = setting(
        None,
        "With --model-control on-demand: models that may be loaded at once, beside what memory allows.",
        least=1,
        most=_MAX_INT32,
        unset="no limit",
    )
    allow_shared_memory: bool = setting(
        False,
        "Let clients exchange tensors in shared memory. Anyone who reaches the port can then make the server read and "
        "write any object that its user may open.",
    )
    max_shared_memory_bytes: int = setting(
        256 * 1024**2, "Limit on the total size of registered shared memory.", least=1, most=_MAX_INT64
    )
    allow_log_settings: bool = setting(False, "Let clients change what is logged.")
    rate_limit: Rate | None = setting(
        None, "Requests per second for each token or address.", unset="none", metavar="N[:BURST]", parse=parse_rate
    )
    trace_endpoint: str = setting(
        "",
        "OpenTelemetry collector for traces, by OTLP over gRPC. Needs `pip install 'fewheads[otel]'`.",
        unset="no tracing",
        metavar="URL",
        variable=(
            "FEWHEADS_SERVE_TRACE_ENDPOINT",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",  # OpenTelemetry's own
            "OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    )
    trace_ratio: float = setting(
        0.01, "Share of traced requests where the caller does not decide.", least=0, most=1, fix="1 traces all."
    )

    def opens_port(self) -> bool:
        """Return whether anything listens on ``host``."""
        return not self.grpc_socket or self.http_port is not None or super().opens_port()

    def broken_rules(self) -> Iterator[UsageError]:
        """Yield the errors of rules beyond the bounds and choices of one setting."""
        yield from _broken_rules(self)
        yield from super().broken_rules()


#: The declaration of each setting, by the name of its field.
DECLARATIONS = declarations_of(Settings)


class Transport(NamedTuple):
    """The library that carries gRPC, and a sentence with the reason."""

    name: str
    reason: str


def choose_transport(wanted: str) -> Transport:
    """Return the transport for a setting: nghttp2 for ``auto`` where its library can be used, grpcio elsewhere."""
    if wanted != "auto":
        return Transport(wanted, "--transport requires it.")
    if problem := _ngh2_problem():
        reason = f"nghttp2 would be faster, but there is {problem}; run pip install 'fewheads[fast]'."
        return Transport("grpcio", reason)
    return Transport("nghttp2", "It is faster than grpcio, and counts what clients make it hold.")


def _ngh2_problem() -> str:
    try:
        import ngh2
    except ImportError as error:
        return f"no usable ngh2 ({error})"
    installed = str(ngh2.__version__)
    return "" if installed == NGH2_VERSION else f"ngh2 {installed} instead of {NGH2_VERSION}"


def _broken_rules(settings: Settings) -> Iterator[UsageError]:

    def wrong(option: str, given: object, expected: str, fix: str) -> UsageError:
        return UsageError(option, given=given, expected=expected, fix=fix)

    path = settings.repository
    if not path.is_dir():
        given = Raw(f"{path}, which {'is a file' if path.exists() else 'does not exist'}")
        fix = "Make one with `fewheads export RUN --repository DIRECTORY`, or run `make demo`."
        yield wrong("REPOSITORY", given, "a directory of bundles", fix)
    sockets = settings.grpc_socket, settings.http_socket
    grpc, metrics, http = None if sockets[0] else settings.grpc_port, settings.metrics_port, settings.http_port
    if grpc and grpc == metrics:
        yield wrong("--metrics-port", metrics, "another port than gRPC's", "Give the two different ports.")
    if http and http in (grpc, metrics):
        yield wrong("--http-port", http, "another port than gRPC's and the metrics'", "Give each its own.")
    if sockets[1] and http is not None:
        yield wrong("--http-port", http, "none beside --http-socket", "Give one of the two.")
    if sockets[1] and sockets[0] == sockets[1]:
        yield wrong("--http-socket", str(sockets[1]), "another path than gRPC's", "Give each its own.")
    url = settings.trace_endpoint
    if url and not url.startswith(("http://", "https://")):
        fix = "Give the address where the collector accepts OTLP over gRPC, usually port 4317."
        yield wrong("--trace-endpoint", url, "http://HOST:PORT or https://HOST:PORT", fix)
    models, mode = settings.load_models, f"--model-control {settings.model_control}"
    if models and settings.model_control != "explicit":
        fix = "Leave it out: all models are loaded."
        yield wrong("--load-model", Raw(mode), "--model-control explicit", fix)
    for option, value in (("--pin", settings.pinned), ("--max-loaded", settings.max_loaded)):
        if value and settings.model_control != "on-demand":
            yield wrong(option, Raw(mode), "--model-control on-demand", "Leave it out: all models stay loaded.")
    if settings.max_loaded is not None and settings.pinned and settings.max_loaded <= len(set(settings.pinned)):
        expected, fix = f"more than the {len(set(settings.pinned))} that --pin keeps", "Raise it, or pin fewer."
        yield wrong("--max-loaded", settings.max_loaded, expected, fix)
    if "*" in models and len(models) > 1:
        yield wrong("--load-model", list(models), "* alone, or names", "Give one or the other.")
    problem = _ngh2_problem() if settings.transport == "nghttp2" else ""
    if problem:
        fix = "Install it: pip install 'fewheads[fast]'."
        yield wrong("--transport", Raw(f"nghttp2, but {problem}"), f"the package ngh2 {NGH2_VERSION}", fix)
