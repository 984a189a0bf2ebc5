"""``fewheads profile``: time the shapes of a layer on this machine."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table, progress, remark
from edge.errors import Literally, UsageError
from edge.runtimes.table import targets

if TYPE_CHECKING:
    from edge.profiling.profile import Progress
    from edge.profiling.table import LatencyTable


def parse_lengths(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Return the lengths of ``--lengths 32,128``, ascending; nothing for none.

    Raises:
        UsageError: one is no number above 0.
    """
    if not value:
        return ()
    try:
        lengths = sorted({int(length) for length in value.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        expected = "numbers of tokens, such as 32,128"
        raise UsageError(f"--{parameter.name}", given=value, expected=expected, fix="Separate them with commas.")
    return tuple(lengths)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), metavar="SHAPES")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The table. Timings that it holds are kept, so an interrupted run goes on when the command is given again.",
)
@click.option("--target", default="auto", show_default=True, help=f"One of {targets()}.")
@click.option("--precision", help="fp32, fp16 or int8, as the bundles have it.  [default: the runtime's first]")
@click.option("--lengths", callback=parse_lengths, help="Tokens, such as 32,128.  [default: those of SHAPES]")
@click.option("--calls", type=click.IntRange(3), default=60, show_default=True, help="Of each model at each length.")
@click.option("--cache", type=click.Path(path_type=Path), help="The cache of builds.  [default: ~/.cache/fewheads]")
@click.option("--replace", is_flag=True, help="Replace a table with another key at --out.")
@json_option
def profile(
    directory: Path,
    out: Path,
    target: str,
    precision: str | None,
    lengths: tuple[int, ...],
    calls: int,
    cache: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Build and time every layer of SHAPES, which `fewheads shapes` wrote, and write a latency table.

    Each layer is timed in turns with the dense one. `fewheads reduce --latency-table` plans with the table, which holds
    for this device, power mode, runtime and precision only.
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
            left = f", about {_clock(elapsed / now.done * (now.shapes - now.done))} left" if now.done else ""
            note = f"{now.name}, {now.step}{left}" if now.done < now.shapes else ""
            bar.update(task, completed=now.done, total=now.shapes, note=note)

        table = profile_shapes(
            directory,
            out,
            target=target,
            precision=precision,
            lengths=lengths,
            calls=calls,
            cache=cache,
            replace=replace,
            on_progress=on_progress,
        )
    throttled = sum(timing.throttled for timing in table.timings) + sum(rest.throttled for rest in table.rest)
    if throttled:
        remark(f"{throttled} timings are marked: the device throttled. Cool it, and give the same command again.")
    if as_json:
        print_json(table)
    else:
        print_latency_table(table, str(out))


def print_latency_table(table: LatencyTable, where: str) -> None:
    """Print a latency table, and its key."""
    print_table(f"{table.name}: {table.label}, in {where}", ("key", ""), list(table.key.items()))
    rows: list[tuple[object, ...]] = [
        (
            timing.tokens,
            timing.shape.num_heads,
            timing.shape.head_dim,
            timing.shape.ffn_dim,
            timing.comparison.milliseconds,
            timing.comparison.ratio,
            "throttled" if timing.throttled else "",
        )
        for timing in table.timings
    ]
    columns = ("tokens", "heads", "width", "units", "ms", "times faster", "")
    print_table("One layer, and how many times faster than the dense one", columns, rows)
    rest = [(rest.tokens, rest.milliseconds, rest.dense_layers) for rest in table.rest]
    print_table("Embeddings and task head", ("tokens", "ms", "dense layers"), rest)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
