"""``fewheads token``: a new bearer token, and its line in the server's token file."""

from __future__ import annotations

import click
import msgspec

from edge.cli.output import json_option, print_json, stderr
from edge.security.scopes import SCOPES
from edge.security.tokens import new_token


@click.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="Permission: to send requests, to change the server's state, or to read its metrics. Repeatable.",
)
@json_option
def token(name: str, scopes: tuple[str, ...], as_json: bool) -> None:
    """Make a bearer token for the client NAME.

    The line for `fewheads serve --tokens FILE` goes to stdout, so that `>> FILE` adds it. The token itself is shown
    once, on stderr; the line holds only its hash. With --json both are in one document.
    """
    secret, line = new_token(name, scopes)
    if as_json:
        print_json({"token": secret, "line": line})
        return
    click.echo(msgspec.json.encode(line))
    stderr.print(f"The token, shown this once: {secret}", highlight=False, soft_wrap=True)
