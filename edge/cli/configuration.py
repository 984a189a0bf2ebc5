"""Options from the environment and a TOML file, of which unknown names are refused, and errors say which it was."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec
from click.core import ParameterSource

from edge.errors import Raw, UsageError

F = TypeVar("F", bound=Callable[..., Any])

_FILE: Final = "edge.cli.configuration.file"
#: What Kubernetes sets for a service whose name is the start of our variables.
_KUBERNETES: Final = re.compile(r"(PORT|SERVICE_HOST|SERVICE_PORT)(_.*)?")


class ConfiguredCommand(click.Command):
    """Command with ``--config FILE``. What neither the command line nor the environment sets comes from that file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; a wrong value names the variable, or the file and its key."""
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            if origin := _origin(ctx, error.param):
                error.param_hint = f"'{error.param.opts[0]}' ({origin})" if error.param else None
            raise
        except UsageError as error:
            raise _located(ctx, error) from None
        _refuse_unknown_variables(self)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; the errors of its settings say where these are from."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise _located(ctx, error) from None


def config_option(command: F) -> F:
    """Add ``--config`` to a :class:`ConfiguredCommand`."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,  # before the options whose values it has
        expose_value=False,
        callback=_configure,
        metavar="TOML",
        help="File of these options, each by its name without --; options and variables come first.",
    )(command)


def _configure(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    parameters = {_key(each): each for each in ctx.command.params if each.name != "config"}
    values = {}
    for key, value in _read(path).items():
        if key not in parameters:
            raise _unknown(f"{path}: {key}", f"an option of `fewheads {ctx.info_name}` without --", key, parameters)
        values[str(parameters[key].name)] = _as_typed(f"{path}: {key}", value, parameters[key])
    ctx.default_map = values
    ctx.meta[_FILE] = path


def _read(path: Path) -> dict[str, Any]:
    fix = "Write `option = value` in each line, such as: grpc-port = 8001."
    try:
        if not path.is_file():  # reading a pipe might not end
            raise FileNotFoundError(2, "a path without a file")
        decoded: dict[str, Any] = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"--config {path}", given=Raw(error.strerror), expected="a file", fix="Give its path."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}", given=Raw(error), expected="TOML", fix=fix) from None
    return decoded


def _as_typed(subject: str, value: object, parameter: click.Parameter) -> object:
    """Return a value of the file as the command line has it, so that the same code checks both."""
    if isinstance(value, list) and getattr(parameter, "multiple", False):
        return [_as_typed(subject, each, click.Argument(["item"])) for each in value]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    fix = "Write it as in `grpc-port = 8001`; an option that may be repeated takes a list."
    raise UsageError(subject, given=value, expected="a text, a number, true or false", fix=fix)


def _refuse_unknown_variables(command: click.Command) -> None:
    prefix = f"FEWHEADS_{command.name}_".upper()
    known = {variable.removeprefix(prefix) for each in command.params for variable in _variables(each)}
    for name in sorted(os.environ):
        rest = name.removeprefix(prefix)
        if rest not in (name, *known) and not _KUBERNETES.fullmatch(rest):
            raise _unknown(name, f"the variable of an option of `fewheads {command.name}`", rest, known, prefix)


def _unknown(subject: str, expected: str, name: str, known: Iterable[str], prefix: str = "") -> UsageError:
    near = difflib.get_close_matches(name, known, 1)
    fix = f"Did you mean {prefix}{near[0]}?" if near else "Leave it out; `--help` shows all."
    return UsageError(subject, given=Raw("an unknown name"), expected=expected, fix=fix)


def _located(ctx: click.Context, error: UsageError) -> UsageError:
    """Return the error with the origin of each option that it names, if that is not the command line."""
    named = set(re.findall(r"--[a-z][\w-]*|REPOSITORY", str(error)))
    origins = [
        f"{option} comes from {origin}."
        for each in ctx.command.params
        for option in named.intersection((each.opts[0], each.human_readable_name))
        if (origin := _origin(ctx, each))
    ]
    fix = " ".join([error.fix, *origins])
    return UsageError(error.subject, given=error.given, expected=error.expected, fix=fix)


def _origin(ctx: click.Context, parameter: click.Parameter | None) -> str:
    """Return where the value of a parameter is from; empty for the command line and for defaults."""
    source = ctx.get_parameter_source(parameter.name or "") if parameter else None
    if parameter and source is ParameterSource.DEFAULT_MAP:
        return f"{_key(parameter)} in {ctx.meta[_FILE]}"
    if parameter and source is ParameterSource.ENVIRONMENT:
        return next((name for name in _variables(parameter) if os.environ.get(name)), "")
    return ""


def _variables(parameter: click.Parameter) -> tuple[str, ...]:
    variables = parameter.envvar or ()
    return (variables,) if isinstance(variables, str) else tuple(variables)


def _key(parameter: click.Parameter) -> str:
    return parameter.opts[0].removeprefix("--")
