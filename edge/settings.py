"""Settings of ``fewheads serve``, each declared once: type, default, help, bounds and choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edge.errors import Raw, UsageError
from edge.instruments.logs import FORMATS, LEVELS
from edge.scheduling.scheduler import DEFAULT_MAX_QUEUE_BYTES
from edge.scheduling.tier_selection import POLICIES
from edge.security.rate import Rate, parse_rate

T = TypeVar("T")

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
class Declaration:
    """The declaration of a setting, beside its type and default."""

    help: str  # its text in ``fewheads serve --help``
    least: float | None = None  # the smallest allowed number; None sets no bounds
    most: float = math.inf  # the largest allowed number
    choices: tuple[str, ...] = ()  # the allowed words; empty allows any
    fix: str = "Leave it out for the default."  # the way out of a wrong value
    unset: str = ""  # the meaning of an empty default or None
    option: str = ""  # its option; empty derives it from the field's name
    metavar: str | None = None  # the name of its value in help; None derives it from the type
    parse: Callable[[str], object] | None = None  # parses its value; None parses it by the type

    def problem(self, option: str, value: Any) -> UsageError | None:
        """Return the error of a value outside the bounds or choices, and None of a good one."""
        if self.choices and value not in self.choices:
            return UsageError(option, given=value, expected=f"one of {', '.join(self.choices)}", fix=self.fix)
        if self.least is not None and not self.least <= value <= self.most:  # this form refuses NaN too
            expected = f"{self.least} or more" if self.most == math.inf else f"{self.least} to {self.most}"
            return UsageError(option, given=value, expected=expected, fix=self.fix)
        return None


def setting(default: T, help: str, **rest: Any) -> T:
    """Return a dataclass field with a :class:`Declaration`."""
    return field(default=default, metadata={"declaration": Declaration(help=help, **rest)})


def port_setting(default: T, help: str, **rest: Any) -> T:
    """Return the field of a port."""
    return setting(default, help, least=0, most=65535, fix="Take a free port, or 0 for any.", **rest)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one server; a UsageError lists all that are wrong."""

    repository: Path = field(
        metadata={"declaration": Declaration(help="Directory of the bundles to serve.", option="REPOSITORY")}
    )
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.")
    grpc_port: int = port_setting(8001, "Port of gRPC; 0 takes any free one.")
    transport: str = setting(
        "auto",
        "Library of gRPC. nghttp2 is faster, counts what clients make it hold, and needs "
        "`pip install 'fewheads[fast]'`; auto takes it where installed.",
        choices=("auto", *TRANSPORTS),
    )
    metrics_port: int | None = port_setting(8002, "Port of Prometheus metrics and the live page; 0 takes any free one.")
    http_port: int | None = port_setting(None, "Port of the same over HTTP; 0 takes any free one.", unset="none")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Name, beside local ones, for which a server without TLS and tokens on a loopback address answers over HTTP, "
        "such as the one that a proxy passes on; may be repeated.",
        unset="none",
        option="--allow-host",
        metavar="NAME",
    )
    target: str = setting("auto", "Runtime, as in `fewheads build --target`.")
    cache: Path | None = setting(None, "Directory of built models.", unset="~/.cache/fewheads")
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
    log_level: str = setting("info", "Lowest level of logged messages.", choices=LEVELS)
    log_format: str = setting(
        "default", "Format of the log; ISO8601 is in UTC, json writes an object per line.", choices=tuple(FORMATS)
    )
    tls_certificate: Path | None = setting(
        None, "PEM; serve over TLS with this certificate. It is read again when it changes.", unset="no TLS"
    )
    tls_key: Path | None = setting(None, "PEM; the key of --tls-certificate.")
    tls_client_ca: Path | None = setting(None, "PEM; accept only clients with a certificate from these authorities.")
    tokens: Path | None = setting(
        None, "Accept only clients with a token in this file of `fewheads token`. It is read again when it changes."
    )
    rate_limit: Rate | None = setting(
        None, "Requests per second for each token or address.", unset="none", metavar="N[:BURST]", parse=parse_rate
    )
    trace_endpoint: str = setting(
        "",
        "OpenTelemetry collector for traces, by OTLP over gRPC. Needs `pip install 'fewheads[otel]'`.",
        unset="no tracing",
        metavar="URL",
    )
    trace_ratio: float = setting(
        0.01, "Share of traced requests where the caller does not decide.", least=0, most=1, fix="1 traces all."
    )

    def __post_init__(self) -> None:
        """Check every value, and the rules for combinations of them."""
        values = ((name, getattr(self, name)) for name in DECLARATIONS)
        problems = (DECLARATIONS[name].problem(option_of(name), value) for name, value in values if value is not None)
        wrong = [*filter(None, problems), *_broken_rules(self)]
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            fix = "\n  ".join(["Correct each:", *map(str, wrong)])
            raise UsageError(f"{len(wrong)} settings", given=Raw("wrong values"), expected="none", fix=fix)

    def checks_hosts(self) -> bool:
        """Return whether only the place of the server keeps strangers out, to which a web page's name may lead."""
        return _is_loopback(self.host) and not self.tls_certificate and not self.tokens

    def exposure_warnings(self) -> list[str]:
        """Return what a stranger on the network can do with these settings; empty on a loopback address."""
        if _is_loopback(self.host):
            return []
        warnings = []
        if not self.tokens and not self.tls_client_ca:
            fix = "--tokens or --tls-client-ca accepts only known clients"
            warnings.append(f"anyone who reaches it may call any RPC; {fix}")
        if not self.tls_certificate:
            readable = "requests, responses and tokens" if self.tokens else "requests and responses"
            warnings.append(f"{readable} can be read on the way; --tls-certificate encrypts them")
        return [f"{self.host} is not a loopback address, and {each}" for each in warnings]


#: The declaration of each setting, by the name of its field.
DECLARATIONS: dict[str, Declaration] = {setting.name: setting.metadata["declaration"] for setting in fields(Settings)}


def option_of(name: str) -> str:
    """Return the command-line option of a setting."""
    return DECLARATIONS[name].option or f"--{name.replace('_', '-')}"


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
    """Yield the errors of rules beyond the bounds and choices of one setting."""

    def wrong(option: str, given: object, expected: str, fix: str) -> UsageError:
        return UsageError(option, given=given, expected=expected, fix=fix)

    path = settings.repository
    if not path.is_dir():
        given = Raw(f"{path}, which {'is a file' if path.exists() else 'does not exist'}")
        fix = "Make one with `fewheads export RUN --repository DIRECTORY`, or run `make demo`."
        yield wrong("REPOSITORY", given, "a directory of bundles", fix)
    grpc, metrics, http = settings.grpc_port, settings.metrics_port, settings.http_port
    if grpc and grpc == metrics:
        yield wrong("--metrics-port", metrics, "another port than gRPC's", "Give the two different ports.")
    if http and http in (grpc, metrics):
        yield wrong("--http-port", http, "another port than gRPC's and the metrics'", "Give each its own.")
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
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        given = Raw("--tls-key alone" if settings.tls_certificate is None else "--tls-certificate alone")
        fix = "Give both, or leave both out."
        yield wrong("--tls-certificate and --tls-key", given, "both or none", fix)
    if settings.tls_client_ca and not settings.tls_certificate:
        given, fix = Raw("no --tls-certificate"), "Give the server a certificate too."
        yield wrong("--tls-client-ca", given, "--tls-certificate and --tls-key", fix)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
