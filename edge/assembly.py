"""The composition root, which makes and connects the parts of a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from edge.connections.quota import Quota
from edge.errors import UsageError
from edge.health.health import Health
from edge.health.supervisor import Notifier, Supervisor, Watchdog
from edge.instruments.energy import energy_meter
from edge.instruments.logs import Logs
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.repository.budget import MemoryBudget
from edge.repository.control import ModelControl
from edge.repository.loader import Loader
from edge.repository.on_demand import OnDemand
from edge.repository.repository import Repository
from edge.rpc.limits import MAX_STREAMS, Limits
from edge.rpc.servicers import InferenceServicer, TelemetryServicer
from edge.runtimes.table import choose
from edge.scheduling.admission import CacheBudget
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import ServingOptions
from edge.security.access import Access, Hosts
from edge.security.certificates import ServerCertificates
from edge.security.rate import RateLimit
from edge.serving.extensions import Extensions, extensions
from edge.serving.inference import InferenceService
from edge.serving.metadata import Metadata
from edge.serving.shared_memory import SharedMemory
from edge.serving.streams import Streams
from edge.serving.traces import Traces
from edge.settings import MAX_INSTANCES, Settings, Transport, choose_transport
from edge.telemetry.telemetry import ServedWork, Sources, Telemetry

if TYPE_CHECKING:
    from edge.grpcio.server import GrpcServer
    from edge.http.server import HttpServer
    from edge.http2.server import Http2Server

_MAX_HTTP_CONNECTIONS: Final = 512
_MAX_METRICS_CONNECTIONS: Final = 64

#: What all clients may make the server hold is at least twice this.
_LEAST_KEPT_BYTES: Final = 64 * 1024**2
#: What one client may make it hold beside the largest message.
_CALLS_BYTES: Final = 16 * 1024**2


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a server that are started, stopped or closed; those that are off are None."""

    scheduler: Scheduler
    repository: Repository
    health: Health
    control: ModelControl
    telemetry: Telemetry
    watchdog: Watchdog
    notifier: Notifier
    supervisor: Supervisor
    transport: Transport
    grpc: GrpcServer | Http2Server
    rest: HttpServer | None
    pages: HttpServer | None  # the port of metrics and the live page
    traces: Traces | None


def assemble(settings: Settings, logs: Logs) -> Parts:
    """Make all parts of a server, inside the event loop that runs them.

    Raises:
        UsageError: a package that an option needs is not installed, a certificate or the tokens cannot be read, or
            several instances are set for a GPU.
    """
    # Parts that may fail come first, because nothing has to be closed then.
    certificates = None
    if settings.tls_certificate and settings.tls_key:
        certificates = ServerCertificates(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    access = Access(settings.tokens) if settings.tokens else None
    traces = Traces(settings.trace_endpoint, settings.trace_ratio) if settings.trace_endpoint else None
    scheduler, memory = _scheduler(settings), MemorySampler()
    options = ServingOptions(scheduler.instances, settings.batching, settings.max_queue_delay_us, settings.policy)
    cache = CacheBudget(settings.cache_mib * 1024**2) if settings.cache_mib else None
    budget = MemoryBudget(memory, settings.memory_headroom_bytes, scheduler.instances, cache)
    loader = Loader(scheduler, settings.target, settings.cache, options, budget, settings.build)
    on_demand = settings.model_control == "on-demand"
    repository = Repository(settings.repository, loader, on_demand=on_demand, pinned=settings.pinned)
    control = ModelControl(repository, settings.model_control, settings.watchdog_seconds, settings.max_loaded)
    models = OnDemand(repository, control)
    health = Health(
        repository,
        scheduler.runs,
        watchdog_seconds=settings.watchdog_seconds,
        strict_readiness=settings.strict_readiness,
    )
    shared_memory = None
    if settings.allow_shared_memory:
        shared_memory = SharedMemory(settings.max_shared_memory_bytes, settings.max_message_bytes)
    timeout_seconds = settings.default_timeout_ms / 1e3 or None
    inference = InferenceService(
        repository,
        scheduler,
        default_timeout_seconds=timeout_seconds,
        shared_memory=shared_memory,
        limit=RateLimit(settings.rate_limit) if settings.rate_limit else None,
        traces=traces,
        cache=cache,
        models=models,
    )
    metadata = Metadata(
        repository,
        scheduler,
        health,
        default_timeout_seconds=timeout_seconds,
        extensions=extensions(settings.model_control, shared_memory),
        service=inference,
    )
    streams = Streams(inference, health.draining)
    allow = settings.allow_log_settings
    changes = Extensions(repository, control, shared_memory, logs, traces=traces, allow_log_settings=allow)
    energy = energy_meter(lambda: ServedWork(repository, scheduler))
    followed = [file for file in (access, certificates) if file]
    kept = 2 * max(settings.max_message_bytes, _LEAST_KEPT_BYTES)
    quota = Quota(kept, settings.max_message_bytes + _CALLS_BYTES)
    sources = Sources(scheduler, repository, health, memory, Sensors(), streams, quota, followed, energy)
    telemetry = Telemetry(sources)
    transport = choose_transport(settings.transport)
    calls = min(max(Limits.max_concurrent_streams, 4 * settings.max_queue_size), MAX_STREAMS)
    grpc = _grpc_server(transport.name, quota)(
        InferenceServicer(inference, metadata, streams, changes, access),
        TelemetryServicer(telemetry, access, health.draining),
        health,
        Limits(max_message_bytes=settings.max_message_bytes, max_concurrent_streams=calls),
        access=access,
        certificates=certificates,
    )
    hosts = Hosts(settings.allowed_hosts) if settings.checks_hosts() else None
    rest = pages = None
    # These modules take memory, and are loaded only where their port is open.
    if settings.http_port is not None or settings.http_socket:
        from edge.http.server import HttpServer
        from edge.rest.paths import RestApi
        from edge.serving.text_models import TextModels

        text_models, most_bytes = TextModels(repository, inference.load_waits), settings.max_message_bytes
        api = RestApi(inference, streams, metadata, text_models, changes, access, most_bytes, hosts, traces)
        rest = HttpServer("http", api.application, quota, _MAX_HTTP_CONNECTIONS, certificates)
    if settings.metrics_port is not None:
        from edge.http.server import HttpServer
        from edge.telemetry.board import metrics_page
        from edge.telemetry.live import LiveReading, dashboard
        from edge.telemetry.metrics import ServerCollector
        from edge.telemetry.pages import Pages

        live, metrics = LiveReading(telemetry.reading), metrics_page(ServerCollector(sources))
        application = Pages({"/telemetry.json": live.page, "/metrics": metrics}, access, hosts, dashboard())
        pages = HttpServer("metrics", application, quota, _MAX_METRICS_CONNECTIONS, certificates)
    notifier = Notifier()
    supervisor = Supervisor(health, repository, scheduler, notifier)
    repository.on_change = supervisor.publish
    return Parts(
        scheduler=scheduler,
        repository=repository,
        health=health,
        control=control,
        telemetry=telemetry,
        watchdog=Watchdog(health, settings.stuck_exit_seconds),
        notifier=notifier,
        supervisor=supervisor,
        transport=transport,
        grpc=grpc,
        rest=rest,
        pages=pages,
        traces=traces,
    )


def _scheduler(settings: Settings) -> Scheduler:
    thread_bound = choose(settings.target).thread_bound
    instances = settings.instances
    if instances is None:
        instances = 1 if thread_bound else min(len(os.sched_getaffinity(0)), MAX_INSTANCES)
    if thread_bound and instances > 1:
        fix = "Leave it out: on a GPU, requests share runs instead."
        raise UsageError("--instances", given=instances, expected="1 on a GPU", fix=fix)
    return Scheduler(
        settings.max_queue_size,
        max_queue_bytes=settings.max_queue_bytes,
        instances=instances,
        admission=settings.admission,
        device_bound=thread_bound,
    )


def _grpc_server(transport: str, quota: Quota) -> Callable[..., GrpcServer | Http2Server]:
    if transport == "grpcio":
        from edge.grpcio.server import GrpcServer  # takes 16 MB

        return GrpcServer
    from edge.http2.server import Http2Server  # its library is an extra

    return partial(Http2Server, quota=quota)
