"""``fewheads top``: live throughput, latency and load of a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import click
import msgspec
from rich.live import Live
from rich.text import Text

from edge.cli.options import FloatRange, connection_options
from edge.cli.output import remark, stdout
from edge.cli.view import view
from edge.errors import ServerError, ServerRefused

if TYPE_CHECKING:
    from edge.client import Client
    from edge.client.connection import Credentials
    from edge.telemetry.window import Reading

#: Time without an answer after which the server counts as gone.
_PATIENCE_SECONDS = 5.0


@click.command()
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="The server's gRPC address.")
@click.option(
    "--interval", type=FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between readings."
)
@click.option("--once", is_flag=True, help="Show one reading, which covers the time since the server's start.")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each reading instead of tables.")
def top(url: str, interval: float, once: bool, credentials: Credentials | None, as_json: bool) -> None:
    """Show throughput, latency and sensors of a server until Ctrl-C.

    The view also has the tiers, queue and memory of the server at --url.

    Rates and percentiles cover the last five seconds, or the last interval if that is longer. A terminal shows one view
    that is updated; a pipe or file gets plain tables. If the server goes away, the command waits for it.
    On a server with tokens, it needs a token of the scope `metrics`.
    """
    from edge.telemetry.window import Recent, Window, document

    live = stdout.is_terminal and not once and not as_json
    screen = Live(Text(f"{url} …"), console=stdout, screen=True, auto_refresh=False)
    recent, gone = Recent(), False
    last: tuple[Reading, Window] | None = None
    with suppress(KeyboardInterrupt), screen if live else nullcontext():  # the usual way to end the command
        for reading, problem in _events(url, interval, credentials):
            if gone != bool(problem) and not live:
                remark(problem or "the server is back")
            gone = bool(problem)
            if reading is not None:
                last = reading, recent.add(reading)
            else:
                recent = Recent()  # counters of a new server start at zero
            if live and last:
                screen.update(view(url, *last, stdout.width, problem), refresh=True)
            elif reading is not None and last:
                if as_json:
                    click.echo(msgspec.json.encode(document(*last)))
                else:
                    stdout.print(view(url, *last, stdout.width))
            if once:
                return


def _events(url: str, interval: float, credentials: Credentials | None) -> Iterator[tuple[Reading | None, str]]:
    """Yield readings, and after the first one, where there are none, the reason."""
    from edge.client import ONCE, Client

    # A board that loses power does not end the connection, so a deadline has to.
    with Client(url, _PATIENCE_SECONDS, retries=ONCE, credentials=credentials) as client:
        yield client.telemetry(), ""
        while True:
            time.sleep(interval)
            yield _event(client)


def _event(client: Client) -> tuple[Reading | None, str]:
    try:
        return client.telemetry(), ""
    except ServerError as error:
        # A refusal, such as of a revoked token, is final unless it has a hint when to retry.
        if isinstance(error, ServerRefused) and not error.retry_after_ms:
            raise
        return None, f"waiting for the server: {error}"
