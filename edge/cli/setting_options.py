"""An option for each setting of a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click

from edge.page_settings import Declaration, PageSettings, declarations_of

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(settings: type[PageSettings]) -> Callable[[F], F]:
    """Return a decorator that adds an option for each setting except REPOSITORY, which is an argument."""
    types, declared = get_type_hints(settings), declarations_of(settings)

    def decorate(command: F) -> F:
        for setting in reversed(fields(settings)):
            declaration = declared[setting.name]
            if declaration.option != "REPOSITORY":
                command = _option(setting.name, types[setting.name], setting.default, declaration)(command)
        return command

    return decorate


def _option(name: str, annotation: Any, default: Any, declaration: Declaration) -> Callable[[F], F]:
    option = declaration.option_for(name)
    if annotation is bool:
        flag = f"{option}/--no-{option.removeprefix('--')}" if default else option
        return click.option(flag, name, is_flag=True, default=default, show_default=default, help=declaration.help)
    repeatable = get_origin(annotation) is tuple
    return click.option(
        option,
        name,
        type=declaration.parse or _parameter_type(annotation),
        multiple=repeatable,
        default=default,
        show_default=declaration.unset or default is not None,
        help=declaration.help,
        envvar=declaration.variable,
        # Settings checks the words, and reports all errors together.
        metavar=f"[{'|'.join(declaration.choices)}]" if declaration.choices else declaration.metavar,
        shell_complete=partial(_complete, declaration.choices) if declaration.choices else None,
    )


def _parameter_type(annotation: Any) -> Any:  # of T, T | None or tuple[T, ...]
    plain = next((part for part in get_args(annotation) if part is not type(None)), annotation)
    return click.Path(path_type=Path) if plain is Path else plain


def _complete(words: tuple[str, ...], context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [word for word in words if word.startswith(typed)]
