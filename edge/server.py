"""The composition root of the server: every part is made here and handed to those that need it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

import msgspec

from edge import backends
from edge.calls import Calls
from edge.control import ModelControl
from edge.errors import UsageError
from edge.extensions import Extensions, extensions
from edge.grpc_server import GrpcServer
from edge.lane import ServingOptions
from edge.logs import Logs
from edge.memory import MemorySampler
from edge.metrics import MetricsServer, ServerCollector
from edge.repository import Entry, Repository
from edge.scheduler import Scheduler
from edge.service import InferenceService
from edge.servicers import INFERENCE, TELEMETRY, InferenceServicer, TelemetryServicer
from edge.settings import Settings
from edge.shared_memory import SharedMemory
from edge.streams import Streams
from edge.telemetry import Telemetry

log = logging.getLogger(__name__)


class Ready(msgspec.Struct, frozen=True):
    """What a server says when it has tried every bundle: who and where it is, and what it serves."""

    process_id: int
    grpc_port: int
    metrics_port: int | None
    ready: tuple[str, ...]
    unavailable: dict[str, str]


async def serve(settings: Settings, on_ready: Callable[[Ready], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Args:
        settings: what was asked for.
        on_ready: called once, when every bundle has been tried and requests are taken.

    Raises:
        UsageError: a port cannot be taken, a GPU shall have several instances, or a model to load is not there.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    logs = Logs(settings.log_level)
    scheduler = _scheduler(settings)
    memory = MemorySampler()
    options = ServingOptions(settings.instances, settings.batching, settings.max_queue_delay_us, settings.policy)
    repository = Repository(
        settings.repository, scheduler, target=settings.target, cache=settings.cache, options=options
    )
    shared_memory = (
        SharedMemory(settings.max_shared_memory_bytes, settings.max_message_bytes)
        if settings.allow_shared_memory
        else None
    )
    service = InferenceService(
        repository,
        scheduler,
        strict_readiness=settings.strict_readiness,
        default_timeout_seconds=settings.default_timeout_ms / 1e3 or None,
        shared_memory=shared_memory,
        extensions=extensions(settings.model_control, shared_memory),
    )
    calls = Calls(service)
    streams = Streams(calls)

    async def changed(entry: Entry) -> None:
        # The highest ready version decides the health of a name, so one broken version does not hide a good one.
        serving = any(other.name == entry.name and other.state == "READY" for other in repository)
        await grpc_server.set_health(entry.name, serving)
        await _tell_readiness(service, grpc_server)

    control = ModelControl(repository, calls, settings.model_control, changed)
    inference = InferenceServicer(service, calls, streams, Extensions(repository, control, shared_memory, logs))
    telemetry = TelemetryServicer(Telemetry(repository, scheduler, memory))
    metrics: MetricsServer | None = None
    polling: asyncio.Task[None] | None = None
    try:
        grpc_server = GrpcServer(inference, telemetry, settings.max_message_bytes)
        await grpc_server.start(settings.host, settings.grpc_port)
        try:
            if settings.metrics_port is not None:
                collector = ServerCollector(repository, scheduler, memory, streams)
                metrics = MetricsServer(collector, settings.host, settings.metrics_port)
            loading = asyncio.create_task(_load(settings, repository, control, service, grpc_server))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await loading  # raises what went wrong, if anything did
                on_ready(_ready(grpc_server.port, metrics.port if metrics else None, repository))
                if settings.model_control == "poll":
                    polling = asyncio.create_task(control.poll(settings.poll_seconds))
            await stopping
            log.info("draining for at most %g s", settings.drain_seconds)
            service.accepting = False
            streams.drain()
            await loading
        finally:
            await grpc_server.drain(settings.drain_seconds)
            await control.close()
            if polling:
                await polling
    finally:
        if metrics:
            await asyncio.to_thread(metrics.close)
        repository.close()
        scheduler.close()
        logs.close()


def _scheduler(settings: Settings) -> Scheduler:
    on_gpu = backends.choose(settings.target).device == "GPU"
    if on_gpu and settings.instances > 1:
        fix = "A GPU gains nothing from rivals: leave it out, and let requests share runs."
        raise UsageError("--instances", given=settings.instances, expected="1 on a GPU", fix=fix)
    return Scheduler(
        settings.max_queue_size,
        max_queue_bytes=settings.max_queue_bytes,
        instances=settings.instances,
        admission=settings.admission,
        device_bound=on_gpu,
    )


async def _load(
    settings: Settings,
    repository: Repository,
    control: ModelControl,
    service: InferenceService,
    grpc_server: GrpcServer,
) -> None:
    explicit = settings.model_control == "explicit" and settings.load_models != ("*",)
    await control.start(settings.load_models if explicit else None)
    known = {entry.name for entry in repository}
    for name in settings.load_models if explicit else ():
        if name not in known:
            expected = f"one of {', '.join(sorted(known)) or 'none at all'}"
            raise UsageError("--load-model", given=name, expected=expected, fix="Leave it out, or put it there.")
    service.accepting = True
    await _tell_readiness(service, grpc_server)
    await grpc_server.set_health(TELEMETRY, True)


async def _tell_readiness(service: InferenceService, grpc_server: GrpcServer) -> None:
    for name in ("", INFERENCE):
        await grpc_server.set_health(name, service.server_ready())


def _ready(grpc_port: int, metrics_port: int | None, repository: Repository) -> Ready:
    return Ready(
        os.getpid(),
        grpc_port,
        metrics_port,
        tuple(f"{entry.name}:{entry.version}" for entry in repository if entry.state == "READY"),
        {entry.path.name: entry.reason for entry in repository if entry.state == "UNAVAILABLE" and entry.wanted},
    )
