"""The command ``fewheads int8``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table
from edge.files import write_whole
from export.bundle.outputs import check_file
from export.finetune import data_inputs, labelled_data
from export.loading import loading_torch
from export.options import DIRECTORY, replace_option, run_data_dir_option
from export.training.runs import recorded
from export.training.watch import counting

if TYPE_CHECKING:
    from export.quantize.compare import Comparison


@click.command()
@click.argument("run", type=DIRECTORY)
@click.option(
    "--method", "methods", multiple=True, help="A way to quantise, repeatable; by default all, or none with --trained."
)
@click.option(
    "--trained",
    multiple=True,
    type=DIRECTORY,
    help="A run of `fewheads finetune --int8` with the task, labels and layers of RUN, repeatable.",
)
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
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON document to a file.")
@replace_option("a file at --out")
@json_option
def int8(
    run: Path,
    methods: tuple[str, ...],
    trained: tuple[Path, ...],
    split: str,
    rows: int,
    data_dir: Path | None,
    out: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Compare ways to quantise a run for TensorRT, by the task's metric.

    Each file runs on ONNX Runtime over a whole split, and is compared with RUN in FP32 item by item.
    """
    config = recorded(run)
    data_dir = labelled_data(config, data_dir)
    inputs = {"RUN": run, **data_inputs(config, data_dir)}
    if out:
        check_file("--out", out, inputs, replace=replace)
    with loading_torch():
        from export.quantize.compare import METHODS, check_methods, compare_int8
    check_methods(methods)
    with counting("scoring") as on_file:
        found = compare_int8(
            run,
            data_dir,
            methods or (() if trained else METHODS),
            trained,
            split=split,
            calibration_rows=rows,
            on_file=on_file,
        )
    if out:
        write_whole(out, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: Comparison) -> None:
    from export.training.intervals import bounds_of

    title = f"{found.run}: {found.task}, {found.split}, n = {found.n}, {found.metric} {found.fp32:.4f} in FP32"
    rows = []
    for one in found.scored:
        cells = (_points(one.difference.value), bounds_of(one.difference.interval, _points))
        rows.append((one.method, one.int8_share, one.value, *cells, one.logits_error))
    print_table(title, ("method", "share in INT8", found.metric, "points", "95 % interval", "logits' error"), rows)


def _points(share: float) -> str:
    return f"{100 * share:+.2f}"
