"""The table of the latencies of a bundle's tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.bench.layer_latencies import PREDICTION
from edge.bundles.latency import Latency, PredictedLatency
from edge.cli.output import print_table


def print_latencies(bundle: str, tiers: Mapping[str, Sequence[Latency]]) -> None:
    """Print the latencies of a bundle's tiers by their names, each labelled; nothing if there are none."""
    found = [(tier, latency) for tier, latencies in tiers.items() for latency in latencies]
    if not found:
        return
    parts = any(latency.part for _, latency in found)
    columns = ("source", "device", "runtime", "precision", "rows", "tokens", "ms", "from", "to", "times faster")
    print_table(
        f"{bundle}, latency of a run: measured, or a {PREDICTION}",
        ("tier", *(("part",) if parts else ()), *columns),
        [(tier, *((latency.part,) if parts else ()), *_cells(latency)) for tier, latency in found],
    )


def _cells(one: Latency) -> tuple[object, ...]:
    predicted = one if isinstance(one, PredictedLatency) else None
    return (
        "prediction" if predicted else "measured",
        f"{one.device} at {predicted.power_mode}" if predicted else one.device,
        one.runtime,
        one.precision,
        one.rows,
        one.tokens,
        one.milliseconds,
        predicted.low_ms if predicted else None,
        predicted.high_ms if predicted else None,
        one.times_faster,
    )
