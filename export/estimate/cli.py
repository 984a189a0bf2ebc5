"""The command ``fewheads estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table, progress
from edge.cli.profile import parse_lengths, print_latency_table
from edge.errors import Literally, UsageError
from edge.profiling.table import PREDICTION
from export.estimate.devices import DEVICES
from export.estimate.roofline import Regime
from export.options import DIRECTORY, replace_option
from export.outputs import check_file

if TYPE_CHECKING:
    from export.estimate.estimate import Estimate

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
@click.argument("bundle", required=False, type=DIRECTORY)
@click.option(
    "--shapes",
    type=DIRECTORY,
    help="Predict the layers of a directory of `fewheads shapes` instead, and write a latency table to --out.",
)
@click.option("--device", default="orin-nano-super", show_default=True, help=f"Board: {' or '.join(DEVICES)}.")
@click.option("--mode", default="25W", show_default=True, help=f"Its power mode: {_MODES}.")
@click.option(
    "--lengths", callback=parse_lengths, help="Tokens, such as 32,128.  [default: 32,128, or those of SHAPES]"
)
@click.option("--batch", "batches", callback=parse_lengths, help="Rows of a run, such as 1,8.  [default: 1]")
@click.option("--loops", type=click.FloatRange(1), help="Of a looped model.  [default: mean of its golden prompts]")
@click.option(
    "--precision", type=click.Choice(["fp16", "int8"]), default="fp16", show_default=True, help="Of --shapes."
)
@click.option(
    "--latency-table",
    "table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Table of `fewheads profile` on the board; its measurements replace predictions.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The table, with --shapes.")
@replace_option("an earlier file at --out")
@json_option
def estimate(
    bundle: Path | None,
    shapes: Path | None,
    device: str,
    mode: str,
    lengths: tuple[int, ...],
    batches: tuple[int, ...],
    loops: float | None,
    precision: str,
    table: Path | None,
    out: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Predict the latency of each tier of BUNDLE on a Jetson Orin Nano, without one.

    None of the output was measured on an Orin. `fewheads profile` and `fewheads bench` measure on the board.
    """
    if (bundle is None) == (shapes is None):
        given = Literally("both" if bundle else "neither")
        raise UsageError(
            "BUNDLE or --shapes", given=given, expected="one of them", fix="Give a bundle, or --shapes DIR."
        )
    if (shapes is None) != (out is None):
        fix = "Give --shapes DIR --out table.json together."
        given = Literally("--shapes alone" if shapes else "--out alone")
        raise UsageError("--shapes and --out", given=given, expected="both or neither", fix=fix)
    if bundle:
        from export.estimate.estimate import estimate_bundle

        with progress() as bar:
            task = bar.add_task(f"predicting {bundle.name}", total=None, note="")
            found = estimate_bundle(
                bundle,
                device,
                mode,
                lengths=lengths,
                batches=batches or (1,),
                table=table,
                loops=loops,
                on_tier=lambda done, tiers: bar.update(task, completed=done, total=tiers),
            )
        if as_json:
            print_json(found)
        else:
            _print(found)
        return
    assert shapes is not None
    assert out is not None
    check_file("--out", out, {"--shapes": shapes}, replace=replace)
    from export.estimate.shapes import estimate_shapes

    with progress() as bar:
        task = bar.add_task("predicting shapes", total=None, note="")
        predicted = estimate_shapes(
            shapes,
            device,
            mode,
            precision=precision,
            lengths=lengths,
            on_shape=lambda done, total: bar.update(task, completed=done, total=total),
        )
    try:
        predicted.write(out)
    except OSError as error:
        fix = "Make room, or give another --out."
        raise UsageError(f"--out {out}", given=Literally(error), expected="a file to write", fix=fix) from None
    if as_json:
        print_json(predicted)
    else:
        print_latency_table(predicted, str(out))


def _print(found: Estimate) -> None:
    parts = ["part"] if any(row.part for row in found.rows) else []
    measured = [""] if any(row.label != PREDICTION for row in found.rows) else []
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
        *measured,
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
            row.prediction.low_ms if row.label == PREDICTION else None,
            row.prediction.high_ms if row.label == PREDICTION else None,
            row.prediction.bound_by,
            row.times_faster,
            *("" if row.label == PREDICTION else row.label for _ in measured),
        )
        for row in found.rows
    ]
    print_table(f"{found.bundle} on {found.device} at {found.power_mode}: {found.label}", columns, rows)
    shares = (
        f"{_NAMES[regime]} {errors.band:.0%} (n = {errors.count}, RMS {errors.rms:.0%})"
        for regime, errors in found.errors.items()
    )
    click.echo(
        "Bands, from published measurements left out of the fit, the widest that applies: " + ", ".join(shares) + "."
    )
    click.echo(f"Kernels: {found.kernels}.")
    for row in found.rows:
        if row.loops and row.rows == found.rows[0].rows:
            click.echo(f"Loops of {row.tier}: {row.loops:.4g}, {row.loops_source}.")
    click.echo(f"Recommended: {found.recommended_tier}, {found.recommendation}. Prediction, not measured on an Orin.")
