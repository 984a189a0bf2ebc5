"""``fewheads serve``: the server in the foreground."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge import backends
from edge.cli.output import json_option, stderr
from edge.settings import Settings

if TYPE_CHECKING:
    from edge.server import Ready


@click.command()
@click.argument("repository", type=click.Path(path_type=Path), default=Path("repository"))
@click.option("--host", default=Settings.host, show_default=True, help="Address to listen on; 0.0.0.0 for the network.")
@click.option("--grpc-port", type=int, default=Settings.grpc_port, show_default=True, help="0 takes any free port.")
@click.option(
    "--metrics-port", type=int, default=Settings.metrics_port, show_default=True, help="0 takes any free port."
)
@click.option("--no-metrics", is_flag=True, help="Serve no Prometheus metrics.")
@click.option("--target", default=Settings.target, show_default=True, help="Backend, as `fewheads build --target`.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where built models lie.  [default: ~/.cache/fewheads]")
@click.option("--max-message-bytes", type=int, default=Settings.max_message_bytes, show_default=True)
@click.option("--max-queue-size", type=int, default=Settings.max_queue_size, show_default=True)
@click.option("--drain-seconds", type=float, default=Settings.drain_seconds, show_default=True)
@click.option(
    "--strict-readiness/--no-strict-readiness", default=True, show_default=True, help="Ready needs every bundle."
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@json_option
def serve(
    repository: Path,
    host: str,
    grpc_port: int,
    metrics_port: int,
    no_metrics: bool,
    target: str,
    cache: Path | None,
    max_message_bytes: int,
    max_queue_size: int,
    drain_seconds: float,
    strict_readiness: bool,
    log_level: str,
    as_json: bool,
) -> None:
    """Serve every bundle in REPOSITORY over gRPC until SIGTERM or Ctrl-C.

    With --json, one line on stdout tells the ports and the models as soon as requests are taken.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings(
        repository=repository,
        host=host,
        grpc_port=grpc_port,
        metrics_port=None if no_metrics else metrics_port,
        target=target,
        cache=cache,
        max_message_bytes=max_message_bytes,
        max_queue_size=max_queue_size,
        drain_seconds=drain_seconds,
        strict_readiness=strict_readiness,
    )
    backends.choose(target)  # a wrong one ends here, not in each bundle's reason
    from edge import server  # grpc takes a quarter of a second to import, and `--help` needs none of it

    asyncio.run(server.serve(settings, lambda ready: _announce(ready, host, as_json)))


def _announce(ready: Ready, host: str, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(ready))
        return
    stderr.print(f"gRPC on {host}:{ready.grpc_port}", highlight=False)
    if ready.metrics_port is not None:
        stderr.print(f"metrics on http://{host}:{ready.metrics_port}/metrics", highlight=False)
    stderr.print(f"ready: {', '.join(ready.ready) or 'nothing'}", highlight=False)
    for name, reason in ready.unavailable.items():
        stderr.print(f"[red]not served:[/red] {name}: {reason}", highlight=False)
