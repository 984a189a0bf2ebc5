"""A reading and its window as tables, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge.cli.output import table
from edge.errors import printable

if TYPE_CHECKING:
    from edge.telemetry.window import MetricWindow, Reading, StageWindow, Window

#: In a terminal narrower than this, a table keeps only the columns that matter most.
_NARROW = 100
_PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")
#: Units of SensorReading, as they are written behind a number, and what of them a person reads.
_UNITS = {"celsius": ("°C", 1.0), "watts": ("W", 1.0), "ratio": ("%", 100.0), "hertz": ("MHz", 1e-6)}
_KINDS = {"frequency_limit": "clock limits"}


def view(url: str, reading: Reading, window: Window, width: int, remark: str = "") -> Group:
    """Return the view: what happened in a window, and the present state of the machine and the queue.

    Args:
        url: address of the server.
        reading: the latest reading.
        window: the difference between it and an earlier one.
        width: of the terminal, in characters.
        remark: shown below the title, for example about the connection.
    """
    span = "since the start" if window.since_start else f"last {window.seconds:.3g} s"
    title = Text(f"{printable(url)}  up {duration(reading.uptime_seconds)}  {span}", style="bold")
    warnings = [Text(printable(text), style="bold red") for text in (remark, *reading.problems) if text]
    return Group(title, *warnings, *_tables(window, narrow=width < _NARROW), _machine(reading))


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: 3 d 4 h, 4 h 12 min, 12 min 5 s, 5 s."""
    days, hours, minutes = int(seconds // 86400), int(seconds // 3600 % 24), int(seconds // 60 % 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (int(seconds % 60), "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2])


def _tables(window: Window, *, narrow: bool) -> Iterator[RenderableType]:
    models = [(f"{model.name}:{model.version}", model) for model in window.models]
    rows: list[list[object]] = [
        [
            name,
            model.state,
            model.answers_per_second,
            model.failures_per_second,
            *_percentiles(model.stages.get("request")),
            *_percentiles(model.stages.get("queue"), _PERCENTILES[1:2]),
            *_percentiles(model.stages.get("compute_infer"), _PERCENTILES[1:2]),
            model.rows_per_run,
        ]
        for name, model in models
    ]
    if len(rows) > 1:
        total = [*_percentiles(window.stages.get("request")), *_percentiles(window.stages.get("queue"), ("p95_ms",))]
        infer = _percentiles(window.stages.get("compute_infer"), ("p95_ms",))
        rows.append(["all", "", window.answers_per_second, window.failures_per_second, *total, *infer, None])
    columns = [
        "model",
        "state",
        "/s",
        "failed /s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "queue p95",
        "compute p95",
        "rows/run",
    ]
    yield _table(columns, rows, ("model", "/s", "p50 ms", "p99 ms") if narrow else columns)
    rows = [
        [
            name,
            tier.tier,
            f"{tier.share:.1%}",
            ", ".join(f"{reason} {count}" for reason, count in sorted(tier.reasons.items())),
            *_percentiles(tier.stages.get("request")),
        ]
        for name, model in models
        for tier in model.tiers
    ]
    if rows:
        columns = ["model", "tier", "share", "why", "p50 ms", "p95 ms", "p99 ms"]
        yield _table(columns, rows, ("model", "tier", "share", "p50 ms", "p99 ms") if narrow else columns)
    rows = [
        [name, of.tier, of.watts, of.requests, of.joules_per_request * 1e3, _times(of.joules_per_token, 1e3)]
        for name, model in models
        for of in model.energy
    ]
    if rows:
        columns = ["model", "tier", "W above idle", "requests", "mJ/request", "mJ/token"]
        yield _table(columns, rows, ("model", "tier", "mJ/request") if narrow else columns)
    rows = [[name, drop.reason, drop.place, drop.count] for name, model in models for drop in model.drops]
    if rows:
        columns = ["model", "not answered", "place", "count"]
        yield _table(columns, rows, columns)
    rows = [
        [name, _metric_name(metric), metric.increase, metric.increase_per_second]
        for name, model in models
        for metric in model.metrics
    ]
    if rows:
        columns = ["model", "metric", "increase", "increase /s"]
        yield _table(columns, rows, columns)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], kept: Sequence[str]) -> Table:
    indices = [columns.index(column) for column in kept]
    return table(kept, [[row[index] for index in indices] for row in rows])


def _percentiles(stage: StageWindow | None, names: Sequence[str] = _PERCENTILES) -> list[Any]:
    return [getattr(stage, name) if stage else None for name in names]


def _times(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def board_facts(reading: Reading) -> dict[str, str | bool]:
    """Return the facts about the board that are known, by name; none on a machine that is no Jetson."""
    if not reading.HasField("board"):
        return {}
    return {field.name: value for field, value in reading.board.ListFields()}


def _metric_name(metric: MetricWindow) -> str:
    """Return the name of a metric and its labels, as on the Prometheus page."""
    labels = ", ".join(f'{name}="{value}"' for name, value in sorted(metric.labels.items()))
    return f"{metric.name}{{{labels}}}" if labels else metric.name


def _machine(reading: Reading) -> Table:
    """Return the board, the queue, the memory and the sensors, a line for each kind."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_column(overflow="fold")
    peak = f"at most {reading.queue_depth_peak} at once, {_size(reading.queue_bytes_peak)}"
    waiting = f"{reading.queue_depth} waiting, {_size(reading.queue_bytes)}; {peak}"
    facts = board_facts(reading)
    if facts:
        names = {"l4t": "L4T", "jetpack": "JetPack", "power_mode": "power mode"}
        told = [str(facts["model"]), *(f"{text} {facts[name]}" for name, text in names.items() if name in facts)]
        lines.add_row("board", Text(printable(", ".join(told))))
    lines.add_row("queue", Text(waiting))
    lines.add_row("streams", str(reading.streams))
    memory = ", ".join(f"{sample.kind.replace('_', ' ')} {_size(sample.size_bytes)}" for sample in reading.memory)
    lines.add_row("memory", Text(printable(memory)))
    kinds: dict[str, list[str]] = {}
    for sensor in reading.sensors:
        unit, factor = _UNITS.get(sensor.unit, (sensor.unit, 1.0))
        kinds.setdefault(sensor.kind, []).append(f"{sensor.name} {sensor.value * factor:.4g} {unit}")
    for kind, values in kinds.items():
        lines.add_row(Text(printable(_KINDS.get(kind, kind))), Text(printable(", ".join(values))))
    if reading.HasField("idle_power_watts"):
        lines.add_row("idle power", f"{reading.idle_power_watts:.4g} W")
    return lines


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB" if size_bytes >= 10 * 2**20 else f"{size_bytes / 2**10:,.0f} KiB"
