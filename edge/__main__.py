"""The ``fewheads`` command. Its subcommands are entry points, so each loads only when it is used."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points, requires
from typing import Any, Final, cast

import click

from edge import __version__
from edge.errors import FewheadsError, Raw, UsageError

_EPILOG = """Exit codes: 0 done, 1 failed, 2 wrong usage, 3 broken bundle, 4 golden check failed, 5 runtime missing or
refused, 6 server unreachable or failed, 7 request refused, 8 device lost, 9 run stuck, 10 shutdown not in time, 130
interrupted.

Shell completion: eval "$(_FEWHEADS_COMPLETE=bash_source fewheads)" (or zsh_source, fish_source)."""

#: The groups of commands in the help and in the README, in their order. They are names of entry points, because `edge`
#: never imports `export`.
GROUPS: Final = {
    "Train and shrink": ("train", "import", "finetune", "report", "evaluate", "language", "reduce", "shapes", "plan"),
    "Experiments": ("compare", "frontier", "int8", "looped", "calculator"),
    "Export and build": ("export", "pack", "estimate", "build", "profile"),
    "Serve and ask": ("serve", "infer", "token"),
    "Measure and inspect": ("bench", "top", "exporter", "info", "doctor"),
}


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the commands by heading, in the order of the help; those without a group, of other packages, come last."""
    known = {name for group in GROUPS.values() for name in group}
    names = set(names)
    groups = {heading: [name for name in group if name in names] for heading, group in GROUPS.items()}
    groups["Other"] = sorted(names - known)
    return {heading: group for heading, group in groups.items() if group}


class _Commands(click.Group):
    """The commands registered under the entry-point group ``fewheads.commands``, loaded on first use."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # click would print "Aborted!" and exit with 1, as if the command had failed.
            ctx.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        groups = grouped(point.name for point in entry_points(group="fewheads.commands"))
        return [name for group in groups.values() for name in group]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        widest = max(map(len, names))
        limit = formatter.width - widest - 4  # the columns' indent and gap
        for heading, group in grouped(names).items():
            commands = [(name, self.get_command(ctx, name)) for name in group]
            with formatter.section(heading):
                # Names as wide as the widest, so that the descriptions of all groups are aligned.
                formatter.write_dl(
                    [(f"{name:{widest}}", each.get_short_help_str(limit)) for name, each in commands if each]
                )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        points = entry_points(group="fewheads.commands", name=cmd_name)
        return _load(next(iter(points))) if points else None


def _load(point: EntryPoint) -> click.Command:
    gc.disable()  # garbage collections would take a tenth of the import time, and find nothing
    try:
        command = point.load()
    finally:
        gc.enable()
    gc.freeze()  # modules live as long as the process, so later collections can skip them
    if point.module.startswith("edge."):  # on a device, services set variables where a shell sets options
        for each in command.params:
            if isinstance(each, click.Option):
                variable = f"FEWHEADS_{point.name}_{each.opts[0].removeprefix('--')}".upper().replace("-", "_")
                each.envvar, each.show_envvar = each.envvar or variable, True
    return cast(click.Command, command)


@click.group(cls=_Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fewheads")
def cli() -> None:
    """Transformers with fewer heads: train and export on a workstation, build and serve on a Jetson."""


def main() -> None:
    """Run the command line and exit; a user's mistake prints one line and no traceback."""
    try:
        cli.main(standalone_mode=True)
    except FewheadsError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        extra = _extra_with(error.name or "")
        fix = f"Install it: pip install 'fewheads[{extra}]'." if extra else "Install the package that has it."
        _fail(UsageError("package", given=Raw(error), expected="an installed package", fix=fix))
    except BrokenPipeError:
        # The reader (head, less) has exited; a second failure while flushing would print a traceback.
        sys.stderr.close()
        sys.exit(1)


def _extra_with(module: str) -> str:
    package = module.partition(".")[0].replace("_", "-")
    for requirement in requires("fewheads") or ():
        match = re.match(r"([\w.-]+).*; extra == ['\"]([\w-]+)['\"]", requirement)
        if match and match[1] == package:
            return match[2]
    return ""


def _fail(error: FewheadsError) -> None:
    click.echo(f"fewheads: {error}", err=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
