"""The command ``fewheads language dequantize``."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option, print_json, working
from export.bundle.outputs import check_free
from export.training.loading import loading_torch
from export.training.options import out_option


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@out_option("Directory for the model.")
@json_option
def dequantize(file: Path, out: Path, as_json: bool) -> None:
    """Make a model that can be fine-tuned of a GGUF file.

    The weights in FILE have a few bits each, and get as many as torch computes with. They are not the published ones,
    and config.json of the model, and of all that are made from it, says so.
    """
    check_free("--out", out, {"FILE": file})
    with loading_torch():
        from export.generate.gguf import dequantize as dequantized
    with working(f"reading {file}"):
        origin = dequantized(file, out)
    if as_json:
        print_json({"model": str(out), "dequantized_from": origin})
    else:
        click.echo(f"{out}: {origin}")
