"""``fewheads serve``: the server in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge.cli.output import json_option, stderr
from edge.instruments.logs import FORMATS, LEVELS
from edge.runtimes.table import choose
from edge.scheduling.elastic import POLICIES
from edge.security.rate import parse_rate
from edge.settings import MODEL_CONTROL_MODES, TRANSPORTS, Settings

if TYPE_CHECKING:
    from edge.server import Ready


@click.command()
@click.argument("repository", type=click.Path(path_type=Path), default=Path("repository"))
@click.option("--host", default=Settings.host, show_default=True, help="Address to listen on; 0.0.0.0 for the network.")
@click.option("--grpc-port", type=int, default=Settings.grpc_port, show_default=True, help="0 takes any free port.")
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default=Settings.transport,
    show_default=True,
    help="What carries gRPC; nghttp2 is faster, needs `pip install 'fewheads[fast]'`, and knows no TLS.",
)
@click.option(
    "--metrics-port", type=int, default=Settings.metrics_port, show_default=True, help="0 takes any free port."
)
@click.option("--http-port", type=int, help="Serve the protocol over HTTP too; 0 takes any free port.  [default: not]")
@click.option("--no-metrics", is_flag=True, help="Serve neither Prometheus metrics nor the page.")
@click.option("--target", default=Settings.target, show_default=True, help="Backend, as `fewheads build --target`.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where built models lie.  [default: ~/.cache/fewheads]")
@click.option("--max-message-bytes", type=int, default=Settings.max_message_bytes, show_default=True)
@click.option("--max-queue-size", type=int, default=Settings.max_queue_size, show_default=True)
@click.option(
    "--max-queue-bytes", type=int, default=Settings.max_queue_bytes, show_default=True, help="Of waiting tensors."
)
@click.option(
    "--instances",
    type=int,
    default=Settings.instances,
    help="Runs that are computed at once, each on one core.  [default: on the CPU as many as cores, on a GPU 1]",
)
@click.option("--batching/--no-batching", default=True, show_default=True, help="Let requests share runs.")
@click.option(
    "--max-queue-delay-us", type=int, help="Wait for others to share a run, if busy.  [default: as each bundle says]"
)
@click.option(
    "--policy", type=click.Choice(POLICIES), help="Which tier answers by default.  [default: as each bundle says]"
)
@click.option(
    "--default-timeout-ms",
    type=float,
    default=Settings.default_timeout_ms,
    show_default=True,
    help="For requests without a deadline; 0 is none.",
)
@click.option(
    "--admission/--no-admission",
    default=True,
    show_default=True,
    help="Refuse at once what is predicted to miss its deadline.",
)
@click.option("--drain-seconds", type=float, default=Settings.drain_seconds, show_default=True)
@click.option(
    "--watchdog-seconds",
    type=float,
    default=Settings.watchdog_seconds,
    show_default=True,
    help="A run that takes longer, and ten times longer than usual, makes the server unready; inf watches none.",
)
@click.option(
    "--stuck-exit-seconds",
    type=float,
    default=Settings.stuck_exit_seconds,
    show_default=True,
    help="Wait so long for such a run, then end with exit code 9; inf waits for ever.",
)
@click.option(
    "--memory-headroom-bytes",
    type=int,
    default=Settings.memory_headroom_bytes,
    show_default=True,
    help="Load no model that would leave less memory free.",
)
@click.option(
    "--strict-readiness/--no-strict-readiness", default=True, show_default=True, help="Ready needs every bundle."
)
@click.option(
    "--model-control",
    type=click.Choice(MODEL_CONTROL_MODES),
    default=Settings.model_control,
    show_default=True,
    help="Load models at the start only, as REPOSITORY changes, or when a client asks for it.",
)
@click.option(
    "--poll-seconds",
    type=float,
    default=Settings.poll_seconds,
    show_default=True,
    help="How often to look at REPOSITORY with --model-control poll.",
)
@click.option(
    "--load-model",
    "load_models",
    multiple=True,
    metavar="NAME",
    help="With --model-control explicit: load it at the start; may be repeated, * is all.  [default: none]",
)
@click.option(
    "--allow-shared-memory",
    is_flag=True,
    help="Let clients exchange tensors in shared memory; whoever reaches the port can then have it read and written.",
)
@click.option("--max-shared-memory-bytes", type=int, default=Settings.max_shared_memory_bytes, show_default=True)
@click.option("--allow-log-settings", is_flag=True, help="Let clients change what is logged.")
@click.option("--log-level", type=click.Choice(LEVELS), default=Settings.log_level, show_default=True)
@click.option(
    "--log-format",
    type=click.Choice(list(FORMATS)),
    default=Settings.log_format,
    show_default=True,
    help="ISO8601 and json are in UTC; json writes one object per line.",
)
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="PEM; serve over TLS, and follow the file.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM; the key of --tls-certificate.")
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path),
    help="PEM; let in only clients with a certificate of these authorities.",
)
@click.option(
    "--tokens",
    type=click.Path(path_type=Path),
    help="Let in only bearers of these tokens, of `fewheads token`, and follow the file.",
)
@click.option(
    "--rate-limit",
    metavar="N[:BURST]",
    callback=lambda _, __, text: None if text is None else parse_rate(text),
    help="Requests per second of each token, or else each address.  [default: none]",
)
@click.option(
    "--trace-endpoint",
    default=Settings.trace_endpoint,
    metavar="URL",
    help="Send OpenTelemetry traces to this collector, by OTLP over gRPC.  [default: nothing is traced]",
)
@click.option(
    "--trace-ratio",
    type=float,
    default=Settings.trace_ratio,
    show_default=True,
    help="Share of the requests to trace, of those whose callers do not say.",
)
@json_option
def serve(metrics_port: int, no_metrics: bool, as_json: bool, **options: Any) -> None:
    """Serve every bundle in REPOSITORY over gRPC until SIGTERM or Ctrl-C.

    With --json, one line on stdout tells the ports and the models as soon as requests are taken.
    """
    # Every option bears the name of the setting that it gives.
    settings = Settings(metrics_port=None if no_metrics else metrics_port, **options)
    choose(settings.target)  # a wrong one ends here, not in each bundle's reason
    from edge import server  # grpc takes a quarter of a second to import, and `--help` needs none of it

    asyncio.run(server.serve(settings, lambda ready: _announce(ready, settings.host, as_json)))


def _announce(ready: Ready, host: str, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(ready))
        return
    stderr.print(f"gRPC on {host}:{ready.grpc_port}", highlight=False)
    if ready.http_port is not None:
        stderr.print(f"HTTP on {host}:{ready.http_port}", highlight=False)
    if ready.metrics_port is not None:
        stderr.print(f"metrics and a live page on http://{host}:{ready.metrics_port}/", highlight=False)
    stderr.print(f"ready: {', '.join(ready.ready) or 'nothing'}", highlight=False)
    for name, reason in ready.unavailable.items():
        stderr.print(f"[red]not served:[/red] {name}: {reason}", highlight=False)
