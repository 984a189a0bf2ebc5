"""The command ``fewheads language mismatch``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option
from export.bundle.outputs import check_workspace
from export.cli.language.shared import experiment_seeds_option, loaded, paper_rank_option, resumed_option
from export.generate.formats import source_of
from export.generate.options import RATE, files_of, limit_option, tuning_precision_option
from export.papers.experiment import SETTINGS
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, device_option
from export.training.provenance import processor

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.training.device import DeviceName
    from export.training.recipe import Precision


@click.command()
@click.argument("backbone", type=DIRECTORY)
@click.option(
    "--data",
    multiple=True,
    default=("calculator:train",),
    show_default=True,
    metavar="FORMAT:PATH",
    help="To train on, as of `fewheads language finetune`; a tenth is held out. Repeatable.",
)
@click.option(
    "--test",
    "tests",
    multiple=True,
    default=("calculator:in_range", "calculator:out_of_range", "calculator:long"),
    show_default=True,
    metavar="FORMAT:PATH",
    help="To answer, beside the data that are trained on. Repeatable.",
)
@experiment_seeds_option
@paper_rank_option
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True, help="Passes; the best one is kept.")
@click.option("--lr", type=FloatRange(0, min_open=True), default=RATE, show_default=True, help="Peak learning rate.")
@tuning_precision_option
@limit_option
@resumed_option
@device_option
@json_option
def mismatch(
    backbone: Path,
    data: tuple[str, ...],
    tests: tuple[str, ...],
    seeds: int,
    rank: int,
    epochs: int,
    lr: float,
    precision: Precision,
    limit: int | None,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Find what a fine-tuned model loses in use (paper 000).

    Trains LoRA adapters on BACKBONE in FP32 and rounded to NF4. Each is scored on the base of its training and merged
    into the FP32 base, with the begin token once and twice, teacher-forced and written freely. Writes records.jsonl, a
    line after each training, and report.md.
    """
    sources, splits = [source_of(text) for text in data], [source_of(text) for text in tests]
    check_workspace("--out", out, {"BACKBONE": backbone, **files_of([*sources, *splits])}, settings=SETTINGS)
    with loading_torch("loading torch, model and data"):
        from export.papers.backward.mismatch import Mismatch, MismatchSettings, begin_of
        from export.papers.experiment import run_experiment

        base, examples, hashes = loaded(backbone, device, sources, splits, limit)
    settings = MismatchSettings(
        base=base.identity,
        data=hashes,
        begin=begin_of(base.tokenizer),
        rank=rank,
        epochs=epochs,
        rate=lr,
        precision=precision,
        seeds=seeds,
        processor=processor(),
    )
    run_experiment(Mismatch(settings, out, base, examples), out, as_json=as_json, plots=False)
