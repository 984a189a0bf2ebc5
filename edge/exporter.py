"""The board's metrics for Prometheus, without a model: what ``fewheads exporter`` runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from edge.connections.quota import Quota
from edge.http.server import HttpServer
from edge.instruments.energy import UnknownWork, energy_meter
from edge.instruments.logs import Logs
from edge.instruments.memory import MemorySampler
from edge.instruments.sampling import watch_board
from edge.instruments.sensors import Sensors
from edge.page_settings import PageSettings
from edge.security.access import Access, Hosts
from edge.security.certificates import ServerCertificates
from edge.telemetry.board import BoardCollector, metrics_page
from edge.telemetry.pages import Pages

log = logging.getLogger(__name__)

_MAX_CONNECTIONS: Final = 64
#: What clients may make it hold: a scrape takes some KiB.
_KEPT_BYTES: Final = 8 * 1024**2
_DRAIN_SECONDS: Final = 0.5


class Exporting(msgspec.Struct, frozen=True):
    """The announcement of an exporter that accepts requests."""

    process_id: int
    metrics_port: int


async def export_metrics(settings: PageSettings, on_ready: Callable[[Exporting], None]) -> None:
    """Serve the metrics of the board until SIGTERM or SIGINT.

    Raises:
        UsageError: the port cannot be taken, or a certificate or the tokens cannot be read.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    logs = Logs(settings.log_level, settings.log_format)
    for warning in settings.exposure_warnings():
        log.warning(warning)
    memory, sensors, energy = MemorySampler(), Sensors(), energy_meter(UnknownWork)
    certificates = None
    if settings.tls_certificate and settings.tls_key:
        certificates = ServerCertificates(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    application = Pages(
        {"/metrics": metrics_page(BoardCollector(memory, sensors, energy))},
        Access(settings.tokens) if settings.tokens else None,
        Hosts(settings.allowed_hosts) if settings.checks_hosts() else None,
    )
    quota = Quota(_KEPT_BYTES, _KEPT_BYTES)
    server = HttpServer("metrics", application, quota, _MAX_CONNECTIONS, certificates)
    await server.start(settings.host, settings.metrics_port or 0)
    watching = asyncio.create_task(watch_board(memory, sensors, energy))
    try:
        on_ready(Exporting(os.getpid(), server.port))
        await stop.wait()
    finally:
        await server.drain(_DRAIN_SECONDS)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        logs.close()
