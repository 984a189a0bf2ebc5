"""``fewheads token``: a new bearer token, and its line in the server's token file."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from edge.cli.output import json_option, print_json, stderr
from edge.errors import Raw, UsageError
from edge.security.tokens import SCOPES, new_token


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
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the token into this new file, as --token-file of clients reads it, and do not show it.",
)
@json_option
def token(name: str, scopes: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Make a bearer token for the client NAME.

    The line for `fewheads serve --tokens FILE` goes to stdout, so that `>> FILE` adds it. The token itself is shown
    once, on stderr, or written to --out; the line holds only its hash. With --json both are in one document.
    """
    secret, line = new_token(name, scopes)
    if out:
        _write(out, secret)
    if as_json:
        print_json({**({"token_file": str(out)} if out else {"token": secret}), "line": line})
        return
    click.echo(msgspec.json.encode(line))
    where = f"The token is in {out}." if out else f"The token, shown this once: {secret}"
    stderr.print(where, highlight=False, markup=False, soft_wrap=True)


def _write(path: Path, secret: str) -> None:
    """Write a token into a new file that only its owner may read; raise a UsageError if that is not possible."""
    try:
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(f"{secret}\n")
    except OSError as error:
        given, fix = Raw(error.strerror), "Name a new file in an existing directory."
        raise UsageError(f"--out {path}", given=given, expected="a file to write", fix=fix) from None
