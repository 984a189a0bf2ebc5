"""``fewheads profile``: a latency table of this machine."""

from __future__ import annotations

import time
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.options import PATH, cache_option, numbers
from edge.cli.output import json_option, print_fields, print_json, print_table, progress, remark
from edge.errors import Literally, UsageError
from edge.runtimes.table import targets

if TYPE_CHECKING:
    from edge.profiling.profile import Progress
    from edge.profiling.table import LatencyTable

_FILE = click.Path(dir_okay=False, path_type=Path)
_SIZES = ("shape.num_heads", "shape.head_dim", "shape.ffn_dim")
_TIMING = ("tokens", *_SIZES, "comparison.milliseconds", "comparison.ratio")


def parse_lengths(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Return the lengths of ``--lengths 32,128``, ascending; empty without any."""
    found = numbers(f"--{parameter.name}", value, "numbers of tokens, such as 32,128", kind=int) if value else ()
    return tuple(sorted(set(map(int, found))))


@click.command()
@click.argument("directory", type=PATH, metavar="SHAPES")
@click.option("--out", required=True, type=_FILE, help="The table; an interrupted run continues with its timings.")
@click.option("--target", default="auto", show_default=True, help=f"One of {targets()}.")
@click.option("--precision", help="A precision of the bundles, such as fp16.  [default: the runtime's first]")
@click.option("--lengths", callback=parse_lengths, help="Tokens, such as 32,128.  [default: those of SHAPES]")
@click.option("--calls", type=click.IntRange(3), default=60, show_default=True, help="Of each model at each length.")
@cache_option
@click.option("--replace", is_flag=True, help="Replace a table with another key at --out.")
@json_option
def profile(directory: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Build and time every layer of SHAPES, which `fewheads shapes` wrote, and write a latency table.

    Each layer is timed in turns with the dense one. `fewheads reduce --latency-table` plans with the table, which is
    valid for this device, power mode, runtime and precision only.
    """
    from edge.profiling.profile import profile as profile_shapes

    if out.exists() and not out.is_file():
        given = Literally("no regular file")
        raise UsageError(f"--out {out}", given=given, expected="a file to write", fix="Give another --out.")
    started = time.monotonic()
    with progress() as bar:
        task = bar.add_task("timing shapes", total=None, note="")

        def on_progress(now: Progress) -> None:
            elapsed = time.monotonic() - started
            remaining = timedelta(seconds=round(elapsed / now.done * (now.shapes - now.done))) if now.done else None
            left = f", about {remaining} left" if remaining else ""
            note = f"{now.name}, {now.step}{left}" if now.done < now.shapes else ""
            bar.update(task, completed=now.done, total=now.shapes, note=note)

        table = profile_shapes(directory, out, on_progress=on_progress, **options)
    throttled = sum(timing.throttled for timing in table.timings) + sum(rest.throttled for rest in table.rest)
    if throttled:
        remark(f"{throttled} timings are marked: the device throttled. Cool it, and run the same command again.")
    if as_json:
        print_json(table)
    else:
        print_latency_table(table, str(out))


def print_latency_table(table: LatencyTable, where: str) -> None:
    """Print a latency table, and its key."""
    print_table(f"{table.name}: {table.label}, in {where}", ("key", ""), list(table.key.items()))
    rows = [[*attrgetter(*_TIMING)(timing), "throttled" if timing.throttled else ""] for timing in table.timings]
    columns = ("tokens", "heads", "width", "units", "ms", "times faster", "")
    print_table("One layer, and how many times faster than the dense one", columns, rows)
    print_fields("Embeddings and task head", ("tokens", "milliseconds", "dense_layers"), table.rest)
