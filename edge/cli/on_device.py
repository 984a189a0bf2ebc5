"""``fewheads bench --on-device``: its options, its tables and its record."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from edge.cli.output import print_json, print_table, progress, remark
from edge.errors import FewheadsError, Literally, UsageError

if TYPE_CHECKING:
    from edge.load.device_record import DeviceRecord

F = TypeVar("F", bound=Callable[..., Any])

_GIVEN = ParameterSource.COMMANDLINE
#: Options of every way to measure.
_ALLOWED = {"bundles", "on_device", "requests", "target", "cache", "as_json"}


class _DeviceOption(click.Option):
    """An option of the benchmark on a board."""

    section = "On a board, with --on-device"


_option = partial(click.option, cls=_DeviceOption)
_OPTIONS = (
    _option("--out", type=click.Path(path_type=Path), help="Write the record, from which tables are made, to FILE."),
    _option(
        "--rounds",
        type=click.IntRange(min=2, max=1000),
        default=10,
        show_default=True,
        help="How often all tiers and batch sizes take turns.",
    ),
    _option(
        "--idle-gaps",
        metavar="SECONDS,...",
        default="0.1,1,5",
        show_default=True,
        help="Pauses before single requests.",
    ),
    _option("--idle-requests", type=click.IntRange(min=1), default=20, show_default=True, help="For each pause."),
    _option(
        "--keep-throttled", is_flag=True, help="Write the record even if it must not be published; it says so and why."
    ),
)
#: The names of their arguments.
DEVICE_OPTIONS = ("out", "rounds", "idle_gaps", "idle_requests", "keep_throttled")


def device_options(command: F) -> F:
    """Add ``--on-device`` and its options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    flag = click.option("--on-device", is_flag=True, help="Measure latency, energy and the board's state, by tier.")
    return flag(command)


def check_options(ctx: click.Context) -> None:
    """Check that the options of one way to measure stand alone.

    Raises:
        UsageError: with ``--on-device``, an option of another way is given; or one of its own without it.
    """
    given = [each for each in ctx.command.params if ctx.get_parameter_source(each.name or "") is _GIVEN]
    if ctx.params["on_device"]:
        allowed = {*_ALLOWED, *DEVICE_OPTIONS}
        other = next((each for each in given if each.name not in allowed), None)
        if other:
            fix = "Leave it out: every tier and batch size is measured, in process and through a server of its own."
            raise UsageError(other.opts[0], given=Literally("it with --on-device"), expected="it alone", fix=fix)
        return
    own = next((each for each in given if isinstance(each, _DeviceOption)), None)
    if own:
        fix = "Add --on-device, or leave it out."
        raise UsageError(own.opts[0], given=Literally("it alone"), expected="--on-device beside it", fix=fix)


def run_on_device(
    paths: tuple[Path, ...],
    *,
    requests: int,
    target: str,
    cache: Path | None,
    as_json: bool,
    out: Path | None,
    rounds: int,
    idle_gaps: str,
    idle_requests: int,
    keep_throttled: bool,
) -> None:
    """Measure, show and write the record of one run.

    Raises:
        UsageError: an option is wrong.
        FewheadsError: the record must not be published, or a bundle cannot be measured.
    """
    from edge.load.device_record import Plan
    from edge.load.on_device import measure_on_device

    plan = Plan(
        requests=requests,
        rounds=rounds,
        idle_gaps_seconds=_seconds(idle_gaps),
        idle_requests=idle_requests,
    )
    if out and not out.parent.is_dir():
        given = Literally(f"{out.parent}, which is no directory")
        raise UsageError("--out", given=given, expected="a directory that is there", fix="Make it.")
    with progress() as bar:
        tasks: dict[str, Any] = {}

        def advanced(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total, note="")
            bar.update(tasks[what], completed=done, total=total)

        record = measure_on_device(paths, plan, target=target, cache=cache, advanced=advanced)
    if as_json:
        print_json(record)
    else:
        show(record)
    publish(record, out, keep=keep_throttled)


def publish(record: DeviceRecord, out: Path | None, *, keep: bool) -> None:
    """Write a record if it may be published, or is to be kept all the same.

    Args:
        record: the record.
        out: the file; None writes nothing.
        keep: whether a record that must not be published is written too.

    Raises:
        FewheadsError: it must not be published, and is not to be kept. Nothing is written.
        UsageError: the file cannot be written.
    """
    from msgspec import json

    from edge.files import write_whole

    if not record.publishable and not keep:
        raise FewheadsError(
            f"benchmark on {record.machine.label}",
            given=Literally("; ".join(record.doubts)),
            expected="a run without throttling, in one power mode with the same clock limits",
            fix="Cool the board, set its power mode and measure again. --keep-throttled writes it, marked.",
        )
    for doubt in record.doubts:
        remark(f"not to be published: {doubt}")
    if out:
        try:
            write_whole(out, json.format(json.encode(record), indent=1) + b"\n")
        except OSError as error:
            fix = "Choose another place."
            raise UsageError(str(out), given=Literally(error.strerror), expected="a file to write", fix=fix) from None
        remark(f"wrote {out}")


def show(record: DeviceRecord) -> None:
    """Print a record as tables."""
    print_table(
        record.machine.label,
        [
            "model",
            "tier",
            "runtime",
            "precision",
            "rows",
            "where",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "n",
            "W",
            "mJ/request",
        ],
        [
            [
                one.model,
                one.tier,
                f"{one.runtime} on {one.device}",
                one.precision,
                one.rows,
                one.where,
                one.latency.p50_ms,
                one.latency.p90_ms,
                one.latency.p99_ms,
                one.latency.count,
                one.power_watts,
                one.energy_millijoules,
            ]
            for one in record.series
        ],
    )
    if record.idle_gaps:
        print_table(
            "served after a pause",
            ["model", "tier", "pause s", "p50 ms", "p90 ms", "p99 ms", "n"],
            [
                [
                    one.model,
                    one.tier,
                    one.gap_seconds,
                    one.latency.p50_ms,
                    one.latency.p90_ms,
                    one.latency.p99_ms,
                    one.latency.count,
                ]
                for one in record.idle_gaps
            ],
        )
    if record.ratios:
        print_table(
            "times faster than the full tier, 95 % interval over rounds",
            ["model", "tier", "rows", "where", "ratio", "low", "high", "rounds"],
            [
                [one.model, one.tier, one.rows, one.where, one.ratio, one.low, one.high, one.rounds]
                for one in record.ratios
            ],
        )


def _seconds(text: str) -> tuple[float, ...]:
    try:
        seconds = tuple(float(part) for part in text.split(","))
    except ValueError:
        seconds = (math.nan,)
    if not all(0 < each <= 600 for each in seconds):
        fix = "Write them with commas between, such as 0.1,1,5."
        raise UsageError("--idle-gaps", given=text, expected="seconds above 0, 600 at most", fix=fix)
    return seconds
