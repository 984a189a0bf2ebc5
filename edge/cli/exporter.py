"""``fewheads exporter``: the board's metrics for Prometheus, without a model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge.cli.configuration import ConfiguredCommand, config_option
from edge.cli.setting_options import setting_options
from edge.page_settings import PageSettings

if TYPE_CHECKING:
    from edge.exporter import Exporting


@click.command(cls=ConfiguredCommand)
@config_option
@setting_options(PageSettings)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON on stdout instead of text on stderr.")
def exporter(as_json: bool, **options: Any) -> None:
    """Serve the board's metrics to Prometheus until SIGTERM or Ctrl-C, without a model.

    These are sensors, memory, energy and throttling, under the names that `fewheads serve` has for them.
    """
    settings = PageSettings(**options)
    from edge.exporter import export_metrics  # takes time, which `--help` does not need

    asyncio.run(export_metrics(settings, lambda ready: _announce(ready, settings, as_json)))


def _announce(ready: Exporting, settings: PageSettings, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(ready))
        return
    scheme = "https" if settings.tls_certificate else "http"
    click.echo(f"metrics on {scheme}://{settings.host}:{ready.metrics_port}/metrics", err=True)
