"""The command ``fewheads estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option, print_json, print_table, working
from edge.cli.profile import parse_lengths
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.roofline import Regime
from export.training.options import DIRECTORY

if TYPE_CHECKING:
    from export.estimate.estimate import BundleEstimate

#: What a row's time depends on most, for people.
_NAMES: dict[Regime, str] = {
    "kernels": "bound by kernels",
    "products": "bound by products",
    "memory": "bound by memory",
    "int8": "INT8",
    "batch": "several rows",
    "narrow": "products or heads narrower than any fitted",
}
_MODES = "; ".join(f"{', '.join(device.modes)} of {name}" for name, device in DEVICES.items())


@click.command()
@click.argument("bundle", type=DIRECTORY)
@click.option("--device", default=DEFAULT_BOARD.board, show_default=True, help=f"Board: {' or '.join(DEVICES)}.")
@click.option("--mode", default=DEFAULT_BOARD.power_mode, show_default=True, help=f"Its power mode: {_MODES}.")
@click.option("--lengths", callback=parse_lengths, help="Tokens, such as 32,128.  [default: 32,128]")
@click.option("--batch", "batches", callback=parse_lengths, help="Rows of a run, such as 1,8.  [default: 1]")
@click.option("--loops", type=FloatRange(1), help="Of a looped model.  [default: mean of its golden prompts]")
@json_option
def estimate(
    bundle: Path,
    device: str,
    mode: str,
    lengths: tuple[int, ...],
    batches: tuple[int, ...],
    loops: float | None,
    as_json: bool,
) -> None:
    """Predict latencies of BUNDLE's tiers on a Jetson Orin Nano.

    None of the output was measured on an Orin. `fewheads profile` and `fewheads bench` measure on the board.
    """
    from export.estimate.estimate import estimate_bundle

    with working(f"predicting {bundle.name}") as on_tier:
        estimated = estimate_bundle(
            bundle, device, mode, lengths=lengths, batches=batches or (1,), loops=loops, on_tier=on_tier
        )
    if as_json:
        print_json(estimated)
    else:
        _print(estimated)


def _print(result: BundleEstimate) -> None:
    parts = ["part"] if any(row.part for row in result.rows) else []
    columns = (
        "tier",
        *parts,
        "precision",
        "rows",
        "tokens",
        "GFLOP",
        "kernels",
        "ms",
        "from",
        "to",
        "bound by",
        "times faster",
    )
    rows = [
        (
            row.tier,
            *(row.part for _ in parts),
            row.precision,
            row.rows,
            row.tokens,
            row.prediction.gflop,
            row.prediction.kernels,
            row.milliseconds,
            row.prediction.low_ms,
            row.prediction.high_ms,
            row.prediction.bound_by,
            row.times_faster,
        )
        for row in result.rows
    ]
    print_table(f"{result.bundle} on {result.device} at {result.power_mode}: {result.label}", columns, rows)
    shares = (
        f"{_NAMES[regime]} {errors.band:.0%} (n = {errors.count}, RMS {errors.rms:.0%})"
        for regime, errors in result.errors.items()
    )
    click.echo(
        "Bands, from published measurements left out of the fit, the widest that applies: " + ", ".join(shares) + "."
    )
    click.echo(f"Kernels: {result.kernels}.")
    for row in result.rows:
        if row.loops and row.rows == result.rows[0].rows:
            click.echo(f"Loops of {row.tier}: {row.loops:.4g}, {row.loops_source}.")
    click.echo(f"Recommended: {result.recommended_tier}, {result.recommendation}. Prediction, not measured on an Orin.")
