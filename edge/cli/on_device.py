"""``fewheads bench --on-device``: its options, its tables and its record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import json

from edge.cli.options import PATH, numbers, section_option
from edge.cli.output import print_fields, print_json, progress, remark
from edge.errors import FewheadsError, Raw
from edge.files import check_parent, write_result

if TYPE_CHECKING:
    from edge.bench.on_device import DeviceRecord

ON_DEVICE = "On a board, with --on-device"
_option = section_option(ON_DEVICE)
DEVICE_OPTIONS = (
    _option("--out", type=PATH, help="Write the record to this file; deploy/device_table.py makes tables of it."),
    _option("--rounds", type=click.IntRange(min=2, max=1000), default=10, help="Turns of all tiers and batch sizes."),
    _option("--idle-gaps", metavar="SECONDS,...", default="0.1,1,5", help="Pauses before single requests."),
    _option("--idle-requests", type=click.IntRange(min=1), default=20, help="Requests for each pause."),
    _option("--keep-throttled", is_flag=True, help="Write the record with the reasons if it must not be published."),
)
_LATENCY = ("latency.p50_ms", "latency.p90_ms", "latency.p99_ms", "latency.count")
_SERIES = ("model", "tier", "runtime", "device", "precision", "rows", "where", *_LATENCY)
_RATIO = ("model", "tier", "rows", "where", "ratio", "low", "high", "rounds")


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
    """Measure one run, and show and write its record."""
    from edge.bench.on_device import Plan, measure_on_device

    gaps = numbers("--idle-gaps", idle_gaps, "seconds above 0, at most 600", most=600)
    plan = Plan(requests, rounds, gaps, idle_requests)
    if out:
        check_parent("--out", out)
    with progress() as bar:
        tasks: dict[str, Any] = {}

        def advanced(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total, note="")
            bar.update(tasks[step], completed=done, total=total)

        record = measure_on_device(paths, plan, target=target, cache=cache, advanced=advanced)
    if as_json:
        print_json(record)
    else:
        loops = ("loops",) if any(one.loops is not None for one in record.series) else ()
        print_fields(record.machine.label, (*_SERIES, "power_watts", "energy_millijoules", *loops), record.series)
        if record.idle_gaps:
            print_fields("served after a pause", ("model", "tier", "gap_seconds", *_LATENCY), record.idle_gaps)
        if record.ratios:
            print_fields("times faster than the full tier, 95 % interval over rounds", _RATIO, record.ratios)
    publish(record, out, keep=keep_throttled)


def publish(record: DeviceRecord, out: Path | None, *, keep: bool) -> None:
    """Write a record to a file, if there is one; raise a FewheadsError if it must not be published, unless ``keep``."""
    if not record.publishable and not keep:
        raise FewheadsError(
            f"benchmark on {record.machine.label}",
            given=Raw("; ".join(record.doubts)),
            expected="a run without throttling, in one power mode with the same clock limits",
            fix="Cool the board, set its power mode and measure again. --keep-throttled writes it, marked.",
        )
    for doubt in record.doubts:
        remark(f"not to be published: {doubt}")
    if out:
        write_result(out, json.format(json.encode(record), indent=1) + b"\n")
        remark(f"wrote {out}")
