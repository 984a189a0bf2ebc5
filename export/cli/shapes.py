"""The command ``fewheads shapes``."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option, print_json, print_table, working
from edge.cli.profile import parse_lengths
from export.bundle.exported import RUNTIMES
from export.bundle.outputs import check_shapes
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, out_option, replace_option


@click.command()
@click.argument("model", type=DIRECTORY)
@out_option("Directory to carry to the device.")
@click.option(
    "--lengths",
    default="32,128",
    show_default=True,
    callback=parse_lengths,
    help="Tokens to be timed, with commas; images have a fixed number.",
)
@click.option(
    "--artifacts",
    multiple=True,
    type=click.Choice(RUNTIMES),
    help="Runtime whose files the bundles carry, repeatable; both by default.",
)
@replace_option("an earlier directory at --out")
@json_option
def shapes(
    model: Path, out: Path, lengths: tuple[int, ...], artifacts: tuple[str, ...], replace: bool, as_json: bool
) -> None:
    """Write the layer shapes of MODEL, for a device to time.

    They are all that `fewheads reduce` may choose for MODEL, a run or a Hugging Face directory. `fewheads profile`
    times them on a device without torch, for `fewheads reduce --latency-table`.
    """
    check_shapes("--out", out, {"MODEL": model}, replace=replace)
    with loading_torch():
        from export.reduce.shapes import write_shapes
    with working("writing shapes") as on_shape:
        written = write_shapes(model, out, lengths=lengths, runtimes=artifacts or RUNTIMES, on_shape=on_shape)
    if as_json:
        print_json(written)
        return
    rows = [(written.directory, written.shapes, ", ".join(map(str, written.lengths)), written.onnx_bytes)]
    print_table("Written", ("directory", "shapes", "tokens", "ONNX bytes"), rows)
