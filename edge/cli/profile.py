"""``fewheads profile``: a latency table of this machine, or the times of a bundle's files."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import msgspec

from edge.bundles.manifest import MANIFEST_NAME
from edge.cli.options import PATH, cache_option, numbers
from edge.cli.output import json_option, print_fields, print_json, print_table, remark, working
from edge.errors import Raw, UsageError
from edge.files import write_result
from edge.runtimes.table import targets

_FILE = click.Path(dir_okay=False, path_type=Path)
_SIZES = ("shape.num_heads", "shape.head_dim", "shape.ffn_dim")
_TIMING = ("tokens", *_SIZES, "comparison.milliseconds", "comparison.ratio")


def parse_lengths(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Return the lengths of ``--lengths 32,128``, ascending; empty without any."""
    lengths = numbers(f"--{parameter.name}", value, "numbers of tokens, such as 32,128", kind=int) if value else ()
    return tuple(sorted(set(map(int, lengths))))


@click.command()
@click.argument("directory", type=PATH, metavar="SHAPES|BUNDLE")
@click.option(
    "--out", type=_FILE, help="The table; of SHAPES required, and an interrupted run continues with its timings."
)
@click.option("--target", default="auto", show_default=True, help=f"One of {targets()}.")
@click.option("--precision", help="Of SHAPES, such as fp16.  [default: the runtime's first]")
@click.option("--lengths", callback=parse_lengths, help="Tokens, such as 32,128.  [default: those of SHAPES]")
@click.option("--calls", type=click.IntRange(3), default=60, show_default=True, help="Of each model at each length.")
@cache_option
@click.option("--replace", is_flag=True, help="Replace a table with another key at --out.")
@json_option
def profile(directory: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    """Time every layer of SHAPES, and write a latency table.

    `fewheads shapes` writes SHAPES. Each layer is built, and timed in turns with the dense one. `fewheads reduce
    --latency-table` plans with the table, which is valid for this device, power mode, runtime and precision only.

    Of a BUNDLE, show the time of each file with one row and with the most rows, and of a looped model also that of one
    loop.
    """
    if (directory / MANIFEST_NAME).exists():
        _profile_bundle(directory, out, as_json, **options)
    elif out is None:
        raise UsageError("--out", expected="a file for the table", fix="Give --out table.json.")
    else:
        _profile_shapes(directory, out, as_json, **options)


def _profile_bundle(
    path: Path,
    out: Path | None,
    as_json: bool,
    *,
    precision: str | None,
    lengths: tuple[int, ...],
    replace: bool,
    **options: Any,
) -> None:
    from edge.bench.parts import time_parts

    for option, value in (("--precision", precision), ("--lengths", lengths)):
        if value:
            fix = "Leave it out: each file of a bundle is timed as it is, with golden inputs."
            raise UsageError(option, given=value, expected="none with a bundle", fix=fix)
    if out and out.exists() and not replace:
        given = Raw("a directory" if out.is_dir() else "a file")
        raise UsageError(f"--out {out}", given=given, expected="a free path", fix="Give another --out, or --replace.")
    remark(f"timing {path.name}: this takes minutes with several tiers or many rows; fewer --calls take less")
    with working(f"timing {path.name}") as on_progress:
        times = time_parts(path, on_progress=on_progress, **options)
    if out:
        write_result(out, msgspec.json.format(msgspec.json.encode(times), indent=1) + b"\n")
    if as_json:
        print_json(times)
        return
    where = " ".join(filter(None, (times.device, times.power_mode)))
    title = f"{times.name} version {times.version} on {where}: medians of {times.calls} calls, in turns"
    print_fields(title, ("tier", "role", "file", "precision", "runtime", "rows", "milliseconds"), times.files)
    if times.loops:
        fields = ("tier", "rows", "milliseconds", "beyond_step_microseconds", "golden_loops", "request_milliseconds")
        print_fields("One loop, and golden requests with the model's own limits", fields, times.loops)


def _profile_shapes(directory: Path, out: Path, as_json: bool, **options: Any) -> None:
    from edge.bench.profile import profile as profile_shapes

    if out.exists() and not out.is_file():
        given = Raw("a directory" if out.is_dir() else "no regular file")
        raise UsageError(f"--out {out}", given=given, expected="a file to write", fix="Give another --out.")
    with working("timing shapes") as show:
        table = profile_shapes(directory, out, on_progress=lambda *now: show(*now[:2], ", ".join(now[2:])), **options)
    throttled = sum(timing.throttled for timing in table.timings) + sum(rest.throttled for rest in table.rest)
    if throttled:
        remark(f"{throttled} timings are marked: the device throttled. Cool it, and run the same command again.")
    if as_json:
        print_json(table)
        return
    print_table(f"{table.name}: {table.label}, in {out}", ("key", ""), list(table.key.items()))
    rows = [[*attrgetter(*_TIMING)(timing), "throttled" if timing.throttled else ""] for timing in table.timings]
    columns = ("tokens", "heads", "width", "units", "ms", "times faster", "")
    print_table("One layer, and how many times faster than the dense one", columns, rows)
    print_fields("Embeddings and task head", ("tokens", "milliseconds", "dense_layers"), table.rest)
