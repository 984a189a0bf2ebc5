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
    from edge.telemetry.window import MetricWindow, ModelWindow, Reading, StageWindow, Window

#: Terminals narrower than this show only the columns that matter most.
_NARROW = 100
#: Unit of a sensor to its symbol, and the factor from the reading to it.
_UNITS = {"celsius": ("°C", 1.0), "watts": ("W", 1.0), "ratio": ("%", 100.0), "hertz": ("MHz", 1e-6)}
_KINDS = {"frequency_limit": "clock limits"}
_FACTS = {"l4t": "L4T", "jetpack": "JetPack", "power_mode": "power mode"}


_PERCENTILES = ("p50 ms", "p95 ms", "p99 ms")
_MODELS = ("model", "state", "/s", "failed /s", *_PERCENTILES, "queue p95", "compute p95", "rows/run")
_TIERS = ("model", "tier", "share", "why", *_PERCENTILES)
_ENERGY = ("model", "tier", "W above idle", "requests", "mJ/request", "mJ/token")
_DROPS = ("model", "not answered", "place", "count")
_METRICS = ("model", "metric", "increase", "increase /s")
#: Columns that a narrow terminal leaves out.
_WIDE = {"state", "failed /s", "p95 ms", "queue p95", "compute p95", "rows/run", "why"}
_WIDE |= {"W above idle", "requests", "mJ/token"}


def view(url: str, reading: Reading, window: Window, width: int, remark: str = "") -> Group:
    """Return tables of a window and of its latest reading, for a terminal of ``width`` characters."""
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
    overview = [[name, model.state, *_rates(model), model.rows_per_run] for name, model in models]
    if len(overview) > 1:
        overview.append(["all", "", *_rates(window), None])
    tiers: list[list[Any]] = []
    energy: list[list[Any]] = []
    drops: list[list[Any]] = []
    metrics: list[list[Any]] = []
    for name, model in models:
        tiers += [
            [name, tier.tier, f"{tier.share:.1%}", tier.reasons, *_percentiles(tier.stages.get("request"))]
            for tier in model.tiers
        ]
        for of in model.energy:
            joules = (of.joules_per_request, of.joules_per_token)
            millijoules = (None if each is None else each * 1e3 for each in joules)
            energy.append([name, of.tier, of.watts, of.requests, *millijoules])
        drops += [[name, drop.reason, drop.place, drop.count] for drop in model.drops]
        metrics += [
            [name, _metric_name(metric), metric.increase, metric.increase_per_second] for metric in model.metrics
        ]
    yield _table(_MODELS, overview, narrow)
    for columns, rows in ((_TIERS, tiers), (_ENERGY, energy), (_DROPS, drops), (_METRICS, metrics)):
        if rows:
            yield _table(columns, rows, narrow)


def _table(columns: Sequence[str], rows: list[list[Any]], narrow: bool) -> Table:
    indices = [index for index, column in enumerate(columns) if not (narrow and column in _WIDE)]
    return table([columns[index] for index in indices], [[row[index] for index in indices] for row in rows])


def _rates(of: ModelWindow | Window) -> list[Any]:
    queue, infer = (_percentiles(of.stages.get(stage))[1] for stage in ("queue", "compute_infer"))
    return [of.answers_per_second, of.failures_per_second, *_percentiles(of.stages.get("request")), queue, infer]


def _percentiles(stage: StageWindow | None) -> list[float | None]:
    return [stage.p50_ms, stage.p95_ms, stage.p99_ms] if stage else [None] * 3


def board_facts(reading: Reading) -> dict[str, str | bool]:
    """Return the known facts about the board by name; none on a machine that is not a Jetson."""
    if not reading.HasField("board"):
        return {}
    return {field.name: value for field, value in reading.board.ListFields()}


def _metric_name(metric: MetricWindow) -> str:
    labels = ", ".join(f'{name}="{value}"' for name, value in sorted(metric.labels.items()))
    return f"{metric.name}{{{labels}}}" if labels else metric.name


def _machine(reading: Reading) -> Table:
    rows: list[tuple[str, str]] = []
    if facts := board_facts(reading):
        known = [str(facts["model"]), *(f"{text} {facts[name]}" for name, text in _FACTS.items() if name in facts)]
        rows.append(("board", ", ".join(known)))
    peak = f"at most {reading.queue_depth_peak} at once, {_size(reading.queue_bytes_peak)}"
    rows.append(("queue", f"{reading.queue_depth} waiting, {_size(reading.queue_bytes)}; {peak}"))
    rows.append(("streams", str(reading.streams)))
    memory = [f"{sample.kind.replace('_', ' ')} {_size(sample.size_bytes)}" for sample in reading.memory]
    rows.append(("memory", ", ".join(memory)))
    kinds: dict[str, list[str]] = {}
    for sensor in reading.sensors:
        unit, factor = _UNITS.get(sensor.unit, (sensor.unit, 1.0))
        kinds.setdefault(sensor.kind, []).append(f"{sensor.name} {sensor.value * factor:.4g} {unit}")
    rows += [(_KINDS.get(kind, kind), ", ".join(values)) for kind, values in kinds.items()]
    if reading.HasField("idle_power_watts"):
        rows.append(("idle power", f"{reading.idle_power_watts:.4g} W"))
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_column(overflow="fold")
    for name, value in rows:
        lines.add_row(Text(printable(name)), Text(printable(value)))
    return lines


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB" if size_bytes >= 10 * 2**20 else f"{size_bytes / 2**10:,.0f} KiB"
