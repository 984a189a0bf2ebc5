"""The composition root: every part of a server is made here and handed to those that need it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge.errors import Literally, UsageError
from edge.grpcio.server import GrpcServer
from edge.health.health import Health
from edge.health.supervisor import Supervisor
from edge.health.systemd import Notifier
from edge.health.watchdog import Watchdog
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
from edge.security.scopes import TELEMETRY_GET
from edge.serving.extensions import Extensions, extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.shared_memory import SharedMemory
from edge.serving.streams import Streams
from edge.serving.traces import Traces
from edge.settings import MAX_INSTANCES, Settings
from edge.telemetry.http import HttpServer
from edge.telemetry.http_access import GuardedPages
from edge.telemetry.metrics import ServerCollector, metrics_app
from edge.telemetry.pages import LiveReading, Pages
from edge.telemetry.sources import Sources
from edge.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    from edge.http2.server import Http2Server
    from edge.rest.server import RestServer


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a server is made of, as far as it has to be started, told or closed.

    Attributes:
        scheduler: where models compute.
        repository: the models.
        control: loads and unloads them.
        metadata: describes the server; it knows whether requests are taken.
        streams: its open streams.
        telemetry: what is told of all this.
        watchdog: ends the process when nothing else helps.
        notifier: tells systemd.
        supervisor: tells everyone else what has become of the server's health.
        grpc: the port of gRPC.
        rest: that of HTTP and JSON; None serves none.
        pages: what the port of metrics shows.
        certificates: for TLS; None serves without it.
        traces: where requests are traced; None traces none.
    """

    scheduler: Scheduler
    repository: Repository
    control: ModelControl
    metadata: Metadata
    streams: Streams
    telemetry: Telemetry
    watchdog: Watchdog
    notifier: Notifier
    supervisor: Supervisor
    grpc: GrpcServer | Http2Server
    rest: RestServer | None
    pages: WSGIApplication
    certificates: ServerCertificates | None
    traces: Traces | None

    def open_pages(self, host: str, port: int) -> HttpServer:
        """Show the pages on a port.

        Raises:
            UsageError: the port cannot be taken.
        """
        return HttpServer(self.pages, host, port, self.certificates)


def assemble(settings: Settings, logs: Logs) -> Parts:
    """Make all parts of a server. It must be done inside the event loop that will run them.

    Raises:
        UsageError: what an option needs is not installed, a certificate or the tokens cannot be read, or a GPU shall
            have several instances.
    """
    # What can be wrong comes first: nothing has to be taken down again then.
    certificates = _certificates(settings)
    access = Access(settings.tokens) if settings.tokens else None
    traces = Traces(settings.trace_endpoint, settings.trace_ratio) if settings.trace_endpoint else None
    scheduler = _scheduler(settings)

    memory = MemorySampler()
    repository = Repository(
        settings.repository,
        scheduler,
        target=settings.target,
        cache=settings.cache,
        options=ServingOptions(scheduler.instances, settings.batching, settings.max_queue_delay_us, settings.policy),
        budget=MemoryBudget(memory, settings.memory_headroom_bytes, scheduler.instances),
    )
    health = Health(repository, scheduler.runs, watchdog_seconds=settings.watchdog_seconds)
    shared_memory = None
    if settings.allow_shared_memory:
        shared_memory = SharedMemory(settings.max_shared_memory_bytes, settings.max_message_bytes)
    timeout_seconds = settings.default_timeout_ms / 1e3 or None
    service = InferenceService(
        repository,
        scheduler,
        default_timeout_seconds=timeout_seconds,
        shared_memory=shared_memory,
        limit=RateLimit(settings.rate_limit) if settings.rate_limit else None,
        traces=traces,
    )
    metadata = Metadata(
        repository,
        scheduler,
        health,
        strict_readiness=settings.strict_readiness,
        default_timeout_seconds=timeout_seconds,
        extensions=extensions(settings.model_control, shared_memory),
    )
    streams = Streams(service)

    control = ModelControl(repository, settings.model_control)
    changes = Extensions(
        repository, control, shared_memory, logs, traces=traces, allow_log_settings=settings.allow_log_settings
    )
    doors = [door for door in (access, certificates) if door]
    sources = Sources(repository, scheduler, health, memory, Sensors(), streams, doors)
    telemetry = Telemetry(sources)
    pages: WSGIApplication = Pages(metrics_app(ServerCollector(sources)), LiveReading(telemetry.reading))
    inference = InferenceServicer(service, metadata, streams, changes, access)
    grpc = _grpc(settings, inference, TelemetryServicer(telemetry, access), access, certificates)
    notifier = Notifier()
    supervisor = Supervisor(
        health,
        repository,
        scheduler,
        server_ready=metadata.server_ready,
        set_health=grpc.set_health,
        services=("", INFERENCE),
        notifier=notifier,
    )
    repository.on_change = supervisor.publish
    return Parts(
        scheduler=scheduler,
        repository=repository,
        control=control,
        metadata=metadata,
        streams=streams,
        telemetry=telemetry,
        watchdog=Watchdog(health, settings.stuck_exit_seconds),
        notifier=notifier,
        supervisor=supervisor,
        grpc=grpc,
        rest=None if settings.http_port is None else _rest(settings, service, metadata, changes, access, certificates),
        pages=GuardedPages(pages, access, TELEMETRY_GET) if access else pages,
        certificates=certificates,
        traces=traces,
    )


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


def _certificates(settings: Settings) -> ServerCertificates | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return ServerCertificates(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)


def _grpc(
    settings: Settings,
    inference: InferenceServicer,
    telemetry: TelemetryServicer,
    access: Access | None,
    certificates: ServerCertificates | None,
) -> GrpcServer | Http2Server:
    calls = min(max(Limits.max_concurrent_streams, 4 * settings.max_queue_size), MAX_STREAMS)
    limits = Limits(max_message_bytes=settings.max_message_bytes, max_concurrent_streams=calls)
    if settings.transport == "grpcio":
        return GrpcServer(inference, telemetry, limits, access=access, certificates=certificates)
    from edge.http2.server import Http2Server  # its library is an extra

    return Http2Server(inference, telemetry, limits, access=access, certificates=certificates)


def _rest(
    settings: Settings,
    service: InferenceService,
    metadata: Metadata,
    changes: Extensions,
    access: Access | None,
    certificates: ServerCertificates | None,
) -> RestServer:
    try:
        from edge.rest.paths import RestApi  # its libraries are an extra
        from edge.rest.server import RestServer
    except ModuleNotFoundError as error:
        given, fix = Literally(f"no module {error.name}"), "pip install 'fewheads[rest]', or leave it out."
        raise UsageError("--http-port", given=given, expected="starlette and uvicorn", fix=fix) from None
    return RestServer(RestApi(service, metadata, changes, access, settings.max_message_bytes), certificates)
