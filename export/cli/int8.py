"""The command ``fewheads int8``."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option, print_json, print_table
from export.finetune import scored_data
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, run_data_dir_option
from export.training.runs import recorded
from export.training.watch import counting


@click.command()
@click.argument("run", type=DIRECTORY)
@click.option("--method", "methods", multiple=True, help="A way to quantise, repeatable.  [default: all]")
@click.option("--split", default="holdout", show_default=True, help="Score on this; choose ways on the hold-out.")
@click.option(
    "--calibration",
    "rows",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Rows of the training set that the ranges are from.",
)
@run_data_dir_option
@json_option
def int8(
    run: Path,
    methods: tuple[str, ...],
    split: str,
    rows: int,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Compare ways to quantise a run for TensorRT.

    Each file runs on ONNX Runtime over a whole split, and its metric of the task is compared with RUN in FP32 item by
    item. A model that embeds sentences, such as an imported one, is scored on GLUE's STS-B.
    """
    data_dir = scored_data(recorded(run), data_dir)
    with loading_torch():
        from export.report.int8 import compare_int8
        from export.training.intervals import bounds_of
    with counting("scoring") as on_file:
        result = compare_int8(run, data_dir, methods, split=split, calibration_rows=rows, on_file=on_file)
    if as_json:
        print_json(result)
        return
    points = "{:+.2f}".format
    cells = [
        (
            one.method,
            one.int8_share,
            one.value,
            points(100 * one.difference.value),
            bounds_of(one.difference.interval, lambda share: points(100 * share)),
            one.logits_error,
        )
        for one in result.scored
    ]
    title = f"{result.run}: {result.task}, {result.split}, n = {result.n}, {result.metric} {result.fp32:.4f} in FP32"
    print_table(title, ("method", "share in INT8", result.metric, "points", "95 % interval", "logits' error"), cells)
