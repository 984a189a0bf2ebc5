"""The composition root: makes every part of a server, subject by subject, and connects them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from edge.errors import Literally, UsageError
from edge.grpcio.server import GrpcServer
from edge.health.health import Health
from edge.health.supervisor import Supervisor
from edge.health.systemd import Notifier
from edge.health.watchdog import Watchdog
from edge.instruments.energy import energy_meter
from edge.instruments.logs import Logs
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.protocol import INFERENCE
from edge.repository.budget import MemoryBudget
from edge.repository.control import ModelControl
from edge.repository.repository import Repository
from edge.rpc.inference_servicer import InferenceServicer
from edge.rpc.limits import MAX_STREAMS, Limits
from edge.rpc.telemetry_servicer import TelemetryServicer
from edge.runtimes.table import choose
from edge.scheduling.lane import ServingOptions
from edge.scheduling.scheduler import Scheduler
from edge.security.access import Access
from edge.security.credentials import ServerCertificates
from edge.security.rate import RateLimit
from edge.serving.extensions import Extensions, extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.shared_memory import SharedMemory
from edge.serving.streams import Streams
from edge.serving.traces import Traces
from edge.settings import MAX_INSTANCES, Settings, Transport, choose_transport
from edge.telemetry.sources import ServedWork, Sources
from edge.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from edge.http2.server import Http2Server
    from edge.rest.server import RestServer
    from edge.telemetry.http import HttpServer


class Security(NamedTuple):
    """Who may call what, and the files of TLS; each is None where it is off."""

    access: Access | None
    certificates: ServerCertificates | None


class Models(NamedTuple):
    """The models, where they compute, how sound they are, and the memory that they take."""

    scheduler: Scheduler
    repository: Repository
    health: Health
    memory: MemorySampler


class Serving(NamedTuple):
    """The protocol without a transport: inference, streams of it, metadata, and the memory that clients share."""

    inference: InferenceService
    metadata: Metadata
    streams: Streams
    shared_memory: SharedMemory | None


class Administration(NamedTuple):
    """What changes a running server: loading and unloading models, and the other extensions."""

    control: ModelControl
    extensions: Extensions


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a server, as far as they are started, stopped or closed.

    Attributes:
        models: the models, and where they compute.
        serving: answers the protocol; the server is ready once its metadata accept requests.
        control: loads and unloads models.
        telemetry: the readings of the server.
        watchdog: ends the process when nothing else helps.
        notifier: reports to systemd.
        supervisor: publishes the server's health.
        transport: what carries gRPC, and why.
        grpc: the port of gRPC.
        rest: the port of HTTP and JSON; None where it is off.
        open_pages: opens the port of metrics and the live page; None where it is off.
        traces: records requests; None where tracing is off.
    """

    models: Models
    serving: Serving
    control: ModelControl
    telemetry: Telemetry
    watchdog: Watchdog
    notifier: Notifier
    supervisor: Supervisor
    transport: Transport
    grpc: GrpcServer | Http2Server
    rest: RestServer | None
    open_pages: Callable[[], HttpServer] | None
    traces: Traces | None


def assemble(settings: Settings, logs: Logs) -> Parts:
    """Make all parts of a server, inside the event loop that runs them.

    Raises:
        UsageError: a package that an option needs is not installed, a certificate or the tokens cannot be read, or
            several instances are set for a GPU.
    """
    # Whatever can be wrong comes first, so that nothing has to be taken down again.
    security = _security(settings)
    traces = Traces(settings.trace_endpoint, settings.trace_ratio) if settings.trace_endpoint else None
    models = _models(settings)
    serving = _serving(settings, models, traces)
    administration = _administration(settings, models, serving, logs, traces)
    sources = _sources(models, serving, security)
    telemetry = Telemetry(sources)
    transport = choose_transport(settings.transport)
    grpc = _grpc(settings, transport.name, serving, administration, telemetry, security)
    notifier = Notifier()
    supervisor = _supervisor(models, serving, grpc, notifier)
    models.repository.on_change = supervisor.publish
    return Parts(
        models=models,
        serving=serving,
        control=administration.control,
        telemetry=telemetry,
        watchdog=Watchdog(models.health, settings.stuck_exit_seconds),
        notifier=notifier,
        supervisor=supervisor,
        transport=transport,
        grpc=grpc,
        rest=_rest(settings, serving, administration, security),
        open_pages=_pages(settings, sources, telemetry, security),
        traces=traces,
    )


def _security(settings: Settings) -> Security:
    certificates = None
    if settings.tls_certificate and settings.tls_key:
        certificates = ServerCertificates(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    return Security(Access(settings.tokens) if settings.tokens else None, certificates)


def _models(settings: Settings) -> Models:
    scheduler = _scheduler(settings)
    memory = MemorySampler()
    repository = Repository(
        settings.repository,
        scheduler,
        target=settings.target,
        cache=settings.cache,
        options=ServingOptions(scheduler.instances, settings.batching, settings.max_queue_delay_us, settings.policy),
        budget=MemoryBudget(memory, settings.memory_headroom_bytes, scheduler.instances),
        build=settings.build,
    )
    health = Health(repository, scheduler.runs, watchdog_seconds=settings.watchdog_seconds)
    return Models(scheduler, repository, health, memory)


def _scheduler(settings: Settings) -> Scheduler:
    thread_bound = choose(settings.target).thread_bound
    instances = settings.instances
    if instances is None:
        instances = 1 if thread_bound else min(len(os.sched_getaffinity(0)), MAX_INSTANCES)
    if thread_bound and instances > 1:
        fix = "A GPU gains nothing from rivals: leave it out, and let requests share runs."
        raise UsageError("--instances", given=instances, expected="1 on a GPU", fix=fix)
    return Scheduler(
        settings.max_queue_size,
        max_queue_bytes=settings.max_queue_bytes,
        instances=instances,
        admission=settings.admission,
        device_bound=thread_bound,
    )


def _serving(settings: Settings, models: Models, traces: Traces | None) -> Serving:
    shared_memory = None
    if settings.allow_shared_memory:
        shared_memory = SharedMemory(settings.max_shared_memory_bytes, settings.max_message_bytes)
    timeout_seconds = settings.default_timeout_ms / 1e3 or None
    inference = InferenceService(
        models.repository,
        models.scheduler,
        default_timeout_seconds=timeout_seconds,
        shared_memory=shared_memory,
        limit=RateLimit(settings.rate_limit) if settings.rate_limit else None,
        traces=traces,
    )
    metadata = Metadata(
        models.repository,
        models.scheduler,
        models.health,
        strict_readiness=settings.strict_readiness,
        default_timeout_seconds=timeout_seconds,
        extensions=extensions(settings.model_control, shared_memory),
    )
    return Serving(inference, metadata, Streams(inference), shared_memory)


def _supervisor(models: Models, serving: Serving, grpc: GrpcServer | Http2Server, notifier: Notifier) -> Supervisor:
    return Supervisor(
        models.health,
        models.repository,
        models.scheduler,
        server_ready=serving.metadata.server_ready,
        set_health=grpc.set_health,
        services=("", INFERENCE),
        notifier=notifier,
    )


def _administration(
    settings: Settings,
    models: Models,
    serving: Serving,
    logs: Logs,
    traces: Traces | None,
) -> Administration:
    control = ModelControl(models.repository, settings.model_control)
    changes = Extensions(
        models.repository,
        control,
        serving.shared_memory,
        logs,
        traces=traces,
        allow_log_settings=settings.allow_log_settings,
    )
    return Administration(control, changes)


def _sources(models: Models, serving: Serving, security: Security) -> Sources:
    files = [file for file in security if file]
    return Sources(
        models.repository,
        models.scheduler,
        models.health,
        models.memory,
        Sensors(),
        serving.streams,
        files,
        energy_meter(lambda: ServedWork(models.repository, models.scheduler)),
    )


def _grpc(
    settings: Settings,
    transport: str,
    serving: Serving,
    administration: Administration,
    telemetry: Telemetry,
    security: Security,
) -> GrpcServer | Http2Server:
    access, certificates = security
    inference = InferenceServicer(
        serving.inference, serving.metadata, serving.streams, administration.extensions, access
    )
    readings = TelemetryServicer(telemetry, access)
    calls = min(max(Limits.max_concurrent_streams, 4 * settings.max_queue_size), MAX_STREAMS)
    limits = Limits(max_message_bytes=settings.max_message_bytes, max_concurrent_streams=calls)
    if transport == "grpcio":
        return GrpcServer(inference, readings, limits, access=access, certificates=certificates)
    from edge.http2.server import Http2Server  # its library is an extra

    return Http2Server(inference, readings, limits, access=access, certificates=certificates)


def _rest(
    settings: Settings, serving: Serving, administration: Administration, security: Security
) -> RestServer | None:
    if settings.http_port is None:
        return None
    try:
        from edge.rest.paths import RestApi  # its libraries are an extra
        from edge.rest.server import RestServer
    except ModuleNotFoundError as error:
        given, fix = Literally(f"no module {error.name}"), "pip install 'fewheads[rest]', or leave it out."
        raise UsageError("--http-port", given=given, expected="starlette and uvicorn", fix=fix) from None
    access, certificates = security
    api = RestApi(serving.inference, serving.metadata, administration.extensions, access, settings.max_message_bytes)
    return RestServer(api, certificates)


def _pages(
    settings: Settings, sources: Sources, telemetry: Telemetry, security: Security
) -> Callable[[], HttpServer] | None:
    if settings.metrics_port is None:
        return None
    # Prometheus' client and the HTTP server of the standard library take 2 MB.
    from edge.telemetry.http import HttpServer
    from edge.telemetry.metrics import ServerCollector, metrics_page
    from edge.telemetry.pages import LiveReading, Pages

    pages = Pages(metrics_page(ServerCollector(sources)), LiveReading(telemetry.reading), security.access)
    return partial(HttpServer, pages.answer, settings.host, settings.metrics_port, security.certificates)
