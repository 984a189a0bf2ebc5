"""Options that several commands share, and help in sections."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from edge.errors import UsageError

if TYPE_CHECKING:
    from edge.client.connection import Credentials

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)

bundles_argument = click.argument("bundles", nargs=-1, required=True, type=PATH, metavar="BUNDLE...")
target_option = click.option(
    "--target", default="auto", show_default=True, help="Runtime, as `fewheads build --target`."
)
cache_option = click.option(
    "--cache",
    type=PATH,
    envvar="FEWHEADS_CACHE",
    help="Directory of built models.  [default: $FEWHEADS_CACHE or ~/.cache/fewheads]",
)
_CONNECTION_OPTIONS = (
    click.option("--tls", is_flag=True, help="Connect with TLS; the server's certificate is from a public authority."),
    click.option("--tls-ca", type=PATH, metavar="PEM", help="Connect with TLS; trust the authorities in this file."),
    click.option("--tls-certificate", type=PATH, metavar="PEM", help="Client certificate, if the server requires one."),
    click.option("--tls-key", type=PATH, metavar="PEM", help="Private key of --tls-certificate."),
    click.option("--token-file", type=PATH, help="File with the bearer token to send; only its owner may read it."),
)


def added(options: tuple[Callable[[F], F], ...], command: F) -> F:
    """Return a command with more options, in their order."""
    for option in reversed(options):
        command = option(command)
    return command


def given_options() -> list[click.Parameter]:
    """Return the parameters of the running command that its line has; defaults and the environment do not count."""
    context = click.get_current_context()
    return [
        each
        for each in context.command.params
        if context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
    ]


def grouped_options(
    group: Callable[..., Any], argument: str, options: tuple[Callable[..., Any], ...]
) -> Callable[[F], F]:
    """Return a decorator that adds options to a command, which gets all of them as one argument.

    Its value is what ``group`` returns for the values of the options, by name.
    """
    names = [option.name for option in click.command("group")(added(options, lambda: None)).params]

    def decorate(command: F) -> F:
        @wraps(command)
        def with_group(*arguments: Any, **rest: Any) -> Any:
            rest[argument] = group(**{name: rest.pop(name) for name in names})
            return command(*arguments, **rest)

        return added(options, with_group)  # type: ignore[return-value]

    return decorate


def _credentials(
    tls: bool, tls_ca: Path | None, tls_certificate: Path | None, tls_key: Path | None, token_file: Path | None
) -> Credentials | None:
    files = (tls_ca, tls_certificate, tls_key)
    if not (tls or any(files) or token_file):
        return None
    from edge.client.connection import Credentials, channel_credentials
    from edge.security.tokens import read_token

    secure = channel_credentials(*files) if tls or any(files) else None
    return Credentials(tls=secure, token=read_token(token_file) if token_file else "")


#: Adds the options for TLS and tokens to a command, which gets the ``credentials`` that they make, None without one.
connection_options = grouped_options(_credentials, "credentials", _CONNECTION_OPTIONS)


def numbers(
    option: str, text: str, expected: str, *, most: float = 1e9, kind: Callable[[str], float] = float
) -> tuple[float, ...]:
    """Return the numbers in a text such as ``0.1,1,5``; raise a UsageError if one is not above 0, or above ``most``."""
    try:
        parsed = tuple(map(kind, text.split(",")))
    except ValueError:
        parsed = ()
    if not parsed or not all(0 < each <= most for each in parsed):
        raise UsageError(option, given=text, expected=expected, fix="Write them with commas between, such as 32,128.")
    return parsed


class FloatRange(click.FloatRange):
    """A range without NaN, which no comparison finds outside."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; raise a UsageError for NaN."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            subject = param.opts[0] if param else self.name
            raise UsageError(subject, given=number, expected="a number", fix="Give one, or leave it out.")
        return number


class SectionOption(click.Option):
    """Option that a :class:`SectionedCommand` lists under a heading of its own."""

    def __init__(self, *arguments: Any, section: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.section = section


def section_option(section: str) -> Callable[..., Callable[[F], F]]:
    """Return ``click.option`` for the options of a section."""
    return partial(click.option, cls=SectionOption, section=section)


class SectionedCommand(click.Command):
    """Command whose help lists the options of each section separately."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of options for each section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx) if isinstance(each, click.Option) else None
            if record:
                sections.setdefault(getattr(each, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
