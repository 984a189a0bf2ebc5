"""The command ``fewheads compare``: mechanisms of paper 002 from one fine-tuned model, with the same training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option
from edge.errors import UsageError
from export.bundle.outputs import check_workspace
from export.finetune import data_inputs, labelled_data
from export.finetune.options import epochs_option, rate_option
from export.finetune.recipe import FinetuningRecipe
from export.papers.experiment import SETTINGS, run_experiment
from export.training.loading import loading_torch
from export.training.options import (
    DIRECTORY,
    device_option,
    out_option,
    plots_option,
    precision_option,
    run_data_dir_option,
)
from export.training.runs import recorded

if TYPE_CHECKING:
    from export.training.device import DeviceName
    from export.training.recipe import Precision


@click.command()
@click.argument("run", type=DIRECTORY)
@run_data_dir_option
@click.option("--only", "names", multiple=True, help="Compare only this mechanism with 'full'; repeatable.")
@click.option("--limit", type=click.IntRange(1), help="Train each on at most so many examples; all by default.")
@epochs_option(1)  # RUN is fine-tuned already
@rate_option
@device_option
@precision_option()
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs of each, seeds from 0 on.")
@click.option(
    "--keep-runs",
    is_flag=True,
    help="Keep each model that is trained now as the run OUT/runs/MECHANISM-seedN, to export.",
)
@plots_option
@out_option("Directory for all results; a comparison with the same options resumes there, with more seeds, too.")
@json_option
def compare(
    run: Path,
    data_dir: Path | None,
    names: tuple[str, ...],
    limit: int | None,
    epochs: int,
    lr: float,
    device: DeviceName,
    precision: Precision,
    seeds: int,
    keep_runs: bool,
    plots: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Compare ways to save attention, as paper 002 does.

    All start from a fine-tuned RUN on a task of GLUE, on SQuAD or on images, and each gets the same training, of which
    the last epoch is kept; weights that start untrained get twice the epochs. Accuracy is measured on dev, and speed,
    peak memory and INT8 on ONNX Runtime, in turns with the dense model: with smaller matrices if possible, else with
    all scorers, masks and gates. Nothing else should run meanwhile. Writes records.jsonl, report.md and a picture of
    the scores.
    """
    config = recorded(run)
    data_dir = labelled_data(config, data_dir)
    check_workspace("--out", out, {"RUN": run, **data_inputs(config, data_dir)}, settings=SETTINGS)
    with loading_torch("loading torch and data"):
        from export.papers.adaptive.mechanisms import MECHANISMS
        from export.papers.adaptive.run import Mechanisms
        from export.papers.adaptive.tables import FULL

        for name in names:
            if name not in MECHANISMS:
                expected, fix = f"one of {', '.join(MECHANISMS)}", "Give a mechanism, or leave --only out."
                raise UsageError("--only", given=name, expected=expected, fix=fix)
        chosen = [name for name in MECHANISMS if not names or name in (FULL, *names)]
        recipe = FinetuningRecipe(epochs=epochs, peak_learning_rate=lr, precision=precision)
        experiment = Mechanisms(
            *(run, data_dir, out, chosen, recipe),
            limit=limit,
            seeds=seeds,
            device=device,
            keep_runs=keep_runs,
        )
    run_experiment(experiment, out, plots=plots, as_json=as_json)
