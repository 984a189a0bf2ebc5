"""The table of the latencies of a bundle's tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.bench.layer_latencies import PREDICTION
from edge.bundles.manifest import Latency, PredictedLatency
from edge.cli.output import print_table


def print_latencies(bundle: str, tiers: Mapping[str, Sequence[Latency]]) -> None:
    """Print the latencies of a bundle's tiers by their names, each labelled; nothing if there are none."""
    rows = [[tier, *_cells(latency)] for tier, latencies in tiers.items() for latency in latencies]
    conditions = ["source", "device", "runtime", "precision", "rows", "tokens"]
    columns = ["tier", "part", *conditions, "ms", "from", "to", "times faster"]
    if not any(row[1] for row in rows):
        columns, rows = columns[:1] + columns[2:], [row[:1] + row[2:] for row in rows]
    if rows:
        print_table(f"{bundle}, latency of a run: measured, or a {PREDICTION}", columns, rows)


def _cells(latency: Latency) -> tuple[object, ...]:
    source, device = "measured", latency.device
    band: tuple[float | None, float | None] = (None, None)
    if isinstance(latency, PredictedLatency):
        source, device = "prediction", f"{latency.device} at {latency.power_mode}"
        band = (latency.low_ms, latency.high_ms)
    facts = (source, device, latency.runtime, latency.precision, latency.rows, latency.tokens)
    return (latency.part, *facts, latency.milliseconds, *band, latency.times_faster)
