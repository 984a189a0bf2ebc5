"""Start and shutdown of a server: its ports, its models, and the requests in progress."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from edge.assembly import Parts, assemble
from edge.errors import UsageError, printable
from edge.instruments.logs import Logs
from edge.settings import Settings

log = logging.getLogger(__name__)

#: Time that a shutdown may take after the requests have ended: for closing models and ending threads.
_CLOSING_SECONDS = 3.0
#: The part of it for answers of the port of metrics.
_PAGES_SECONDS = 0.5


class Ready(msgspec.Struct, frozen=True):
    """The announcement of a server that has tried to load every bundle."""

    process_id: int
    transport: str  # the library that carries gRPC, one of :data:`edge.settings.TRANSPORTS`
    grpc_port: int | None  # None on a Unix socket
    metrics_port: int | None  # None where it is off, as ``http_port``
    ready: tuple[str, ...]  # the models that it serves, each as ``NAME:VERSION``
    unavailable: dict[str, str]  # the directories of the bundles that it does not serve, and the reasons
    http_port: int | None = None
    grpc_socket: str | None = None  # the path of a Unix socket instead of the port
    http_socket: str | None = None
    on_demand: tuple[str, ...] = ()  # the models that requests load, as in ``ready``


async def serve(settings: Settings, on_ready: Callable[[Ready], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; ``on_ready`` is called once the server accepts requests.

    Raises:
        UsageError: as :func:`edge.assembly.assemble`, a port cannot be taken, or a model to load does not exist.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as closing:
        logs = Logs(settings.log_level, settings.log_format)
        closing.callback(logs.close)
        for warning in settings.exposure_warnings():
            log.warning(warning)
        parts = assemble(settings, logs)
        log.info("gRPC is carried by %s. %s", *parts.transport)
        closing.callback(parts.watchdog.close)
        closing.callback(parts.scheduler.close)
        if parts.traces:
            closing.push_async_callback(asyncio.to_thread, parts.traces.close)
        closing.callback(asyncio.create_task(parts.telemetry.watch()).cancel)
        metrics_port = None
        if parts.pages:
            await parts.pages.start(settings.host, settings.metrics_port or 0)
            closing.push_async_callback(parts.pages.drain, _PAGES_SECONDS)
            metrics_port = parts.pages.port
        await parts.grpc.start(settings.host, settings.grpc_port, settings.grpc_socket)
        polling: list[asyncio.Task[None]] = []
        closing.push_async_callback(lambda: asyncio.gather(*polling))
        closing.push_async_callback(parts.control.close)  # ends the polling
        servers = [server for server in (parts.grpc, parts.rest) if server]
        closing.push_async_callback(lambda: asyncio.gather(*(each.drain(settings.drain_seconds) for each in servers)))
        closing.callback(parts.health.drain)  # first, also after a failed start: it ends watches
        closing.callback(asyncio.create_task(parts.supervisor.run()).cancel)
        if parts.rest:
            await parts.rest.start(settings.host, settings.http_port or 0, settings.http_socket)

        loading = asyncio.create_task(_load(settings, parts))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await loading  # raises its error, if any
            if settings.model_control == "none" and not list(parts.repository):
                fix = "`fewheads export RUN --repository DIRECTORY` writes one, and so does `fewheads pack MODEL.onnx`"
                log.warning("%s has no bundle, a directory with a manifest.json; %s", settings.repository, fix)
            on_ready(_ready(settings, parts, metrics_port))
            parts.notifier.notify(READY=1)
            if settings.model_control == "poll":
                polling.append(asyncio.create_task(parts.control.poll(settings.poll_seconds)))
        await stopping
        log.info("draining for at most %g s", settings.drain_seconds)
        parts.watchdog.bound_shutdown(settings.drain_seconds + _CLOSING_SECONDS)
        parts.notifier.notify(STOPPING=1)
        parts.health.drain()
        parts.control.stop()
        await loading


async def _load(settings: Settings, parts: Parts) -> None:
    option, only = "--load-model", None  # all
    if settings.model_control == "on-demand":
        option, only = "--pin", settings.pinned
    elif settings.model_control == "explicit" and settings.load_models != ("*",):
        only = settings.load_models
    await parts.control.start(only)
    known = {entry.name for entry in parts.repository}
    for name in only or ():
        if name not in known:
            expected = f"one of {', '.join(sorted(known)) or 'none at all'}"
            raise UsageError(option, given=name, expected=expected, fix="Leave it out, or add its bundle.")
    parts.health.accept()


def _ready(settings: Settings, parts: Parts, metrics_port: int | None) -> Ready:
    entries = list(parts.repository)
    return Ready(
        os.getpid(),
        parts.transport.name,
        parts.grpc.port or None,
        metrics_port,
        tuple(f"{entry.name}:{entry.version}" for entry in entries if entry.state == "READY"),
        {
            printable(entry.path.name): entry.reason
            for entry in entries
            if entry.state == "UNAVAILABLE" and entry.wanted
        },
        (parts.rest.port or None) if parts.rest else None,
        _path(settings.grpc_socket),
        _path(settings.http_socket),
        tuple(f"{entry.name}:{entry.version}" for entry in entries if entry.version and entry.on_demand),
    )


def _path(socket: Path | None) -> str | None:
    return str(socket.absolute()) if socket else None
