"""Devices to plan for: this machine, which is measured, and those with a latency table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edge.profiling.table import LatencyTable
from export.reduction.latency import machine_key, measure_times, table_times
from export.reduction.search import Costs, Grid
from export.tasks.objectives import Head
from export.transformer import TransformerConfig


class Device(NamedTuple):
    """What the parts of a model take on a device.

    Attributes:
        name: for people.
        label: ``measured``, or that it is a prediction.
        key: of the latency table.
        times: of the options of a layer, in units of the dense one.
        rest: of embeddings and task head, in the same unit.
    """

    name: str
    label: str
    key: dict[str, str]
    times: Costs
    rest: float


def measured_device(model: Head, grid: Grid, tokens: int, state: Path, on_shape: Callable[[int, int], None]) -> Device:
    """Measure this machine's processor."""
    times, rest = measure_times(model, grid, tokens, cache=state / "latency.json", on_shape=on_shape)
    table = LatencyTable(key=machine_key(model.transformer.config))
    return Device(table.name, table.label, table.key, times, rest)


def tabled_device(path: Path, config: TransformerConfig, grid: Grid, tokens: int) -> Device:
    """Take a device from its latency table.

    Raises:
        UsageError: the table cannot be read, is of another model, or lacks shapes or the length.
    """
    table = LatencyTable.read(path)
    times, rest = table_times(table, config, grid, tokens, f"latency table {path}")
    return Device(table.name, table.label, table.key, times, rest)
