"""Health check of a container: exits with 0 if the server is ready, and otherwise says why not and exits with 1.

    python healthcheck.py [HOST:PORT] [--tls-ca PEM] [--token-file FILE]

Readiness is open to every client, so a token only adds the reasons.
"""

from __future__ import annotations

import sys

import click

from edge.cli.options import connection_options
from edge.client import Client
from edge.client.connection import Credentials
from edge.errors import FewheadsError


@click.command()
@click.argument("server", default="127.0.0.1:8001")
@click.option("--timeout-seconds", default=5.0, show_default=True, help="Time limit of each call.")
@connection_options
def healthcheck(server: str, timeout_seconds: float, credentials: Credentials | None) -> None:
    """Check that the server at SERVER is ready for requests."""
    try:
        with Client(server, credentials=credentials, timeout_seconds=timeout_seconds) as client:
            if client.ready():
                click.echo("ready")
                return
            waiting = [model for model in client.index() if model["state"] != "READY"]
    except FewheadsError as error:
        click.echo(str(error))
        sys.exit(1)
    models = "; ".join(f"{model['name']} {model['state']} {model['reason']}".strip() for model in waiting)
    click.echo(f"not ready: {models or 'the server starts or ends'}")
    sys.exit(1)


if __name__ == "__main__":
    healthcheck()
