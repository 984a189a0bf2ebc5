"""The command ``fewheads looped``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from edge.cli.output import json_option
from edge.errors import Raw, UsageError
from export.bundle.outputs import check_workspace
from export.papers.experiment import SETTINGS
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, out_option, plots_option

#: Packages of the baselines, and their names for pip.
_PACKAGES = {"sklearn": "scikit-learn", "xgboost": "xgboost-cpu"}


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=DIRECTORY)
@click.option("--prompts", type=click.IntRange(2), default=1280, show_default=True, help="Prompts of each experiment.")
@click.option("--loops", type=click.IntRange(32), default=120, show_default=True, help="Run looped models so long.")
@plots_option
@out_option("Directory for all results. A function class that is done there is not computed again.")
@json_option
def looped(runs: tuple[Path, ...], prompts: int, loops: int, plots: bool, out: Path, as_json: bool) -> None:
    """Repeat paper 003's experiments with looped transformers.

    RUN is one of `fewheads train looped-…`, looped or --unlooped. Runs of the same shape and training count as seeds of
    one model. For each function class, the looped and the unlooped model with most seeds, or the first of them, are
    compared with each other and with the baselines. Further shapes (--layers, --dim, --injection) have curves of their
    own. Writes records.jsonl, report.md and figures.
    """
    check_workspace("--out", out, {f"RUN {run}": run for run in runs}, settings=SETTINGS)
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            fix = "Install the baselines: pip install 'fewheads[baselines]'."
            raise UsageError(package, given=Raw("not installed"), expected="the package", fix=fix)
    with loading_torch("loading torch and runs"):
        from export.papers.experiment import run_experiment
        from export.papers.looped.run import Looped

        experiment = Looped.of_runs(runs, prompts=prompts, loops=loops)
    run_experiment(experiment, out, plots=plots, as_json=as_json)
