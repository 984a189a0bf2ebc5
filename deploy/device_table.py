"""Markdown tables of what boards measured.

    python deploy/device_table.py RECORD.json...                          prints them
    python deploy/device_table.py --into edge/README.md [RECORD.json...]  replaces those of a document

``fewheads bench --on-device --out FILE`` writes records. Without RECORD, those in ``deploy/device_records`` are used. A
record of a run that throttled is refused, and a document takes only a Jetson's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from edge.bench.on_device import DeviceRecord, Ratio, Series
from edge.errors import FewheadsError, Raw, UsageError
from edge.files import write_whole

RECORDS = Path(__file__).parent / "device_records"
#: Lines of a document around the table.
BEGIN, END = "<!-- device table: made by deploy/device_table.py -->", "<!-- end of the device table -->"
NOTHING = "Nothing has been measured on a Jetson yet."

_HEADINGS = (
    "model, tier",
    "runtime, precision",
    "rows",
    "in process, p50 / p99 ms",
    "served, p50 / p99 ms",
    "times faster, served (95 %)",
    "mJ a request",
    "n",
)


def read_record(path: Path) -> DeviceRecord:
    """Read a record.

    Raises:
        UsageError: the file is not a record.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeviceRecord)
    except (OSError, msgspec.MsgspecError) as error:
        fix = "Name a file that `fewheads bench --on-device --out FILE` wrote."
        raise UsageError(f"record {path}", given=Raw(error), expected="a device record", fix=fix) from None


def markdown(records: Sequence[DeviceRecord]) -> str:
    """Return a table for each record under the name of its machine, or a sentence if there are none.

    Raises:
        UsageError: a record must not be published.
    """
    for record in records:
        if not record.publishable:
            raise UsageError(
                f"record of {record.machine.label}, {record.created}",
                given=Raw("; ".join(record.doubts)),
                expected="a run without throttling, in one power mode with the same clock limits",
                fix="Measure again.",
            )
    return "\n\n".join(map(_section, records)) or NOTHING


def insert(document: Path, records: Sequence[DeviceRecord]) -> None:
    """Replace the table between the marks of a document.

    Raises:
        UsageError: a record is not from a Jetson or must not be published, or the document has no marks.
    """
    for record in records:
        if record.machine.board is None:
            given = Raw(record.machine.label)
            fix = "Leave it out; without --into the table is printed."
            raise UsageError("record", given=given, expected="a Jetson's, for a document", fix=fix)
    text = document.read_text()
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        fix = f"Write {BEGIN} and {END} on lines of their own."
        raise UsageError(str(document), given=Raw("no marks"), expected="the marks of the table", fix=fix)
    write_whole(document, f"{before}{BEGIN}\n\n{markdown(records)}\n\n{END}{after}".encode())


def _section(record: DeviceRecord) -> str:
    lines = [
        f"**{record.machine.label}**, {record.created[:10]}, {_conditions(record)}",
        "",
        f"| {' | '.join(_HEADINGS)} |",
        f"| --- | --- |{' ---: |' * (len(_HEADINGS) - 2)}",
    ]
    local = {_key(one): one for one in record.series if one.where == "in process"}
    ratios = {(one.model, one.tier, one.rows): one for one in record.ratios if one.where == "served"}
    for served in (one for one in record.series if one.where == "served"):
        cells = (
            f"`{served.model}`, {served.tier}",
            f"{served.runtime} {served.runtime_version} on {served.device}, {served.precision}",
            str(served.rows),
            _latency(local[_key(served)]),
            _latency(served),
            _ratio(ratios.get(_key(served))),
            "" if served.energy_millijoules is None else f"{served.energy_millijoules:.3g}",
            str(served.latency.count),
        )
        lines.append(f"| {' | '.join(cells)} |")
    if record.idle_gaps:
        lines += ["", _gaps(record)]
    return "\n".join(lines)


def _conditions(record: DeviceRecord) -> str:
    parts = []
    for kind, unit, scale, names in (
        ("frequencies_hertz", "MHz", 1e6, ("gpu", "emc")),
        ("temperatures_celsius", "°C", 1.0, ("tj-thermal", "tj-therm")),
    ):
        for name in names:
            seen = record.observed.get(kind, {}).get(name)
            if seen:
                parts.append(f"{name.partition('-')[0]} {seen.low / scale:.0f} to {seen.high / scale:.0f} {unit}")
    if record.idle_watts is not None:
        parts.append(f"{record.idle_watts:.2g} W idle")
    return ", ".join([*parts, f"{record.plan.rounds} rounds"])


def _gaps(record: DeviceRecord) -> str:
    pauses = sorted({gap.gap_seconds for gap in record.idle_gaps})
    found = {(gap.model, gap.tier, gap.gap_seconds): gap.latency for gap in record.idle_gaps}
    lines = [
        f"| served after a pause, p50 / p99 ms | {' | '.join(f'{pause:g} s' for pause in pauses)} | n |",
        f"| --- |{' ---: |' * (len(pauses) + 1)}",
    ]
    for model, tier in dict.fromkeys((gap.model, gap.tier) for gap in record.idle_gaps):
        latencies = [found[model, tier, pause] for pause in pauses]
        cells = [f"{one.p50_ms:.3g} / {one.p99_ms:.3g}" for one in latencies]
        lines.append(f"| `{model}`, {tier} | {' | '.join(cells)} | {latencies[0].count} |")
    return "\n".join(lines)


def _key(series: Series) -> tuple[str, str, int]:
    return series.model, series.tier, series.rows


def _latency(series: Series) -> str:
    return f"{series.latency.p50_ms:.3g} / {series.latency.p99_ms:.3g}"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[RECORD...]")
@click.option("--into", type=click.Path(path_type=Path, exists=True), help="A document with the marks of a table.")
def table(paths: tuple[Path, ...], into: Path | None) -> None:
    """Print tables of each RECORD, or write them into a document."""
    records = [read_record(path) for path in paths or sorted(RECORDS.glob("*.json"))]
    if into:
        insert(into, records)
    else:
        click.echo(markdown(records))


if __name__ == "__main__":
    try:
        table.main(standalone_mode=True)
    except FewheadsError as error:
        click.echo(f"device_table.py: {error}", err=True)
        sys.exit(error.exit_code)
