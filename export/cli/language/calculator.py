"""The command ``fewheads language calculator``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option
from export.bundle.outputs import check_workspace
from export.cli.language.shared import experiment_seeds_option, loaded, paper_rank_option, resumed_option
from export.generate.formats import source_of
from export.generate.options import FULL_RATE, RATE, limit_option
from export.papers.experiment import SETTINGS
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, device_option, precision_option
from export.training.provenance import processor

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.training.device import DeviceName
    from export.training.recipe import Precision


@click.command()
@click.argument("backbone", type=DIRECTORY)
@experiment_seeds_option
@paper_rank_option
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Passes; the best one is kept.")
@click.option("--lr", type=FloatRange(0, min_open=True), default=RATE, show_default=True, help="Peak, of adapters.")
@click.option(
    "--full-lr", type=FloatRange(0, min_open=True), default=FULL_RATE, show_default=True, help="Peak, of all weights."
)
@precision_option()
@limit_option
@resumed_option
@device_option
@json_option
def calculator(
    backbone: Path,
    seeds: int,
    rank: int,
    epochs: int,
    lr: float,
    full_lr: float,
    precision: Precision,
    limit: int | None,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Fine-tune a language model as a calculator (paper 000).

    Trains all weights of BACKBONE, and LoRA adapters on it, on the calculator's expressions, and counts the right
    answers to others in range, out of range and long. Writes records.jsonl, a line after each training, and report.md.
    """
    check_workspace("--out", out, {"BACKBONE": backbone}, settings=SETTINGS)
    with loading_torch("loading torch, model and data"):
        from export.papers.backward.calculators import CalculatorSettings, FinetunedCalculators
        from export.papers.experiment import run_experiment

        tests = [source_of(f"calculator:{split}") for split in ("in_range", "out_of_range", "long")]
        base, examples, hashes = loaded(backbone, device, [source_of("calculator:train")], tests, limit)
    settings = CalculatorSettings(
        base=base.identity,
        data=hashes,
        rank=rank,
        epochs=epochs,
        rate=lr,
        full_rate=full_lr,
        precision=precision,
        seeds=seeds,
        processor=processor(),
    )
    run_experiment(FinetunedCalculators(settings, out, base, examples), out, as_json=as_json, plots=False)
