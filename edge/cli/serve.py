"""``fewheads serve``: runs the server in the foreground."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge.cli.configuration import ConfiguredCommand, config_option
from edge.cli.setting_options import setting_options
from edge.runtimes.table import choose_to_run
from edge.settings import Settings

if TYPE_CHECKING:
    from edge.server import Ready


@click.command(cls=ConfiguredCommand)
@click.argument(
    "repository", type=click.Path(path_type=Path), default=Path("repository"), envvar="FEWHEADS_SERVE_REPOSITORY"
)
@config_option
@setting_options(Settings)
@click.option("--no-metrics", is_flag=True, help="Serve neither Prometheus metrics nor the live page.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON on stdout instead of text on stderr.")
def serve(metrics_port: int, no_metrics: bool, as_json: bool, **options: Any) -> None:
    """Serve bundles of REPOSITORY over gRPC until SIGTERM or Ctrl-C.

    With --json, one line on stdout has the ports, transport and models as soon as the server accepts requests.
    """
    settings = Settings(metrics_port=None if no_metrics else metrics_port, **options)
    choose_to_run(settings.target)  # fail here, not once for each bundle
    # gRPC's core reads this when it is imported. Otherwise it logs what clients send with GOAWAY, as it is.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from edge import server  # imports the transports, which `--help` does not need
    from edge.repository.load import LOAD_THREAD

    gc.freeze()  # modules live as long as the process, so collections can skip them
    _run(server.serve(settings, lambda ready: _announce(ready, settings, as_json)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the server has ended in good order, and the process is about to
    if any(thread.name == LOAD_THREAD for thread in threading.enumerate()):
        # A load that never ends. An orderly exit would destroy the runtime in which it computes, and abort.
        sys.stdout.flush()
        os._exit(0)


def _run(serving: Coroutine[None, None, None]) -> None:
    """Run the server, on uvloop if it is installed, which reduces the processor time of a request by a tenth."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


def _announce(ready: Ready, settings: Settings, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(ready))
        return
    grpc = f"unix:{ready.grpc_socket}" if ready.grpc_socket else f"{settings.host}:{ready.grpc_port}"
    lines = [f"gRPC on {grpc}, transport {ready.transport}"]
    if ready.http_socket:
        lines.append(f"HTTP on unix:{ready.http_socket}")
    elif ready.http_port is not None:
        lines.append(f"HTTP on {settings.url(ready.http_port)}")
    if ready.metrics_port is not None:
        lines.append(f"metrics and a live page on {settings.url(ready.metrics_port)}/")
    lines.append(f"ready: {', '.join(ready.ready) or 'nothing'}")
    if ready.on_demand:
        lines.append(f"loaded on demand: {', '.join(ready.on_demand)}")
    for name, reason in ready.unavailable.items():
        lines.append(f"{click.style('not served:', fg='red')} {name}: {reason}")
    click.echo("\n".join(lines), err=True)
