"""The composition root of the server: every part is made here and handed to those that need it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

import msgspec

from edge.device import DeviceThread
from edge.grpc_server import INFERENCE, TELEMETRY, GrpcServer
from edge.memory import MemorySampler
from edge.metrics import MetricsServer, ServerCollector
from edge.repository import Entry, Repository
from edge.service import InferenceService
from edge.settings import Settings
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
        UsageError: a port cannot be taken.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    device = DeviceThread(settings.max_queue_size)
    memory = MemorySampler()
    repository = Repository(settings.repository, device, target=settings.target, cache=settings.cache)
    service = InferenceService(repository, device, strict_readiness=settings.strict_readiness)
    metrics: MetricsServer | None = None
    try:
        grpc_server = GrpcServer(service, Telemetry(repository, device, memory), settings.max_message_bytes)
        await grpc_server.start(settings.host, settings.grpc_port)
        try:
            if settings.metrics_port is not None:
                collector = ServerCollector(repository, device, memory)
                metrics = MetricsServer(collector, settings.host, settings.metrics_port)
            loading = asyncio.create_task(_load(repository, service, grpc_server))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await loading  # raises what went wrong, if anything did
                on_ready(_ready(grpc_server.port, metrics.port if metrics else None, repository))
            await stopping
            log.info("draining for at most %g s", settings.drain_seconds)
            service.accepting = False
            await loading
        finally:
            await grpc_server.drain(settings.drain_seconds)
    finally:
        if metrics:
            await asyncio.to_thread(metrics.close)
        repository.close()
        device.close()


async def _load(repository: Repository, service: InferenceService, grpc_server: GrpcServer) -> None:
    loop = asyncio.get_running_loop()

    def changed(entry: Entry) -> None:
        # The highest ready version decides the health of a name, so one broken version does not hide a good one.
        serving = any(other.name == entry.name and other.state == "READY" for other in repository)
        asyncio.run_coroutine_threadsafe(grpc_server.set_health(entry.name, serving), loop).result()

    await asyncio.to_thread(repository.load_all, changed)
    service.accepting = True
    for name in ("", INFERENCE):
        await grpc_server.set_health(name, service.server_ready())
    await grpc_server.set_health(TELEMETRY, True)


def _ready(grpc_port: int, metrics_port: int | None, repository: Repository) -> Ready:
    return Ready(
        os.getpid(),
        grpc_port,
        metrics_port,
        tuple(f"{entry.name}:{entry.version}" for entry in repository if entry.state == "READY"),
        {entry.path.name: entry.reason for entry in repository if entry.state == "UNAVAILABLE"},
    )
