"""The options by which commands connect with TLS and a token."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from edge.client.connection import Credentials

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)
_OPTIONS = (
    click.option("--tls", is_flag=True, help="Connect with TLS; the server's certificate is from a public authority."),
    click.option("--tls-ca", type=_FILE, metavar="PEM", help="Connect with TLS; trust the authorities in this file."),
    click.option(
        "--tls-certificate", type=_FILE, metavar="PEM", help="Client certificate, if the server asks for one."
    ),
    click.option("--tls-key", type=_FILE, metavar="PEM", help="Private key of --tls-certificate."),
    click.option("--token-file", type=_FILE, help="File with the bearer token to send; only its owner may read it."),
)


def connection_options(command: F) -> F:
    """Add the options for TLS and tokens to a command, which receives them as the argument ``credentials``."""

    @wraps(command)
    def with_credentials(
        *arguments: Any,
        tls: bool,
        tls_ca: Path | None,
        tls_certificate: Path | None,
        tls_key: Path | None,
        token_file: Path | None,
        **options: Any,
    ) -> Any:
        wanted = tls or tls_ca or tls_certificate or tls_key
        files = (tls_ca, tls_certificate, tls_key)
        credentials = _credentials(files if wanted else None, token_file) if wanted or token_file else None
        return command(*arguments, credentials=credentials, **options)

    decorated: Any = with_credentials
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _credentials(
    tls_files: tuple[Path | None, Path | None, Path | None] | None, token_file: Path | None
) -> Credentials:
    from edge.client.connection import Credentials
    from edge.security.credentials import channel_credentials, read_token

    return Credentials(
        tls=channel_credentials(*tls_files) if tls_files else None,
        token=read_token(token_file) if token_file else "",
    )
