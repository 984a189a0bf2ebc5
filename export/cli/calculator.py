"""The command ``fewheads calculator compare``."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option
from edge.errors import Raw, UsageError
from export.bundle.outputs import check_workspace
from export.papers.calculator.specs import NAMES
from export.papers.calculator.stack import NAMES as STACK_NAMES
from export.papers.experiment import SETTINGS
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, out_option, plots_option
from export.training.runs import read_config


@click.group()
def calculator() -> None:
    """Compare the calculators of papers 000 and 001."""


@calculator.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=DIRECTORY)
@plots_option
@out_option("Directory for all results. The same command resumes there, with more runs, too.")
@json_option
def compare(runs: tuple[Path, ...], plots: bool, out: Path, as_json: bool) -> None:
    """Compare calculators: their errors, the benchmark's scores, and right answers to longer expressions.

    Runs of one model and training are its seeds. `fewheads bench` measures what an answer costs.
    """
    check_workspace("--out", out, {f"RUN {run}": run for run in runs}, settings=SETTINGS)
    known: dict[object, Path] = {}
    for run in runs:
        config = read_config(run)
        if config.model not in (*NAMES, *STACK_NAMES):
            expected = f"one of {', '.join((*NAMES, *STACK_NAMES))}"
            fix = "Give runs of `fewheads train calculator-…`."
            raise UsageError(f"RUN {run}", given=config.model, expected=expected, fix=fix)
        seed = config.provenance.seed
        key = config.model, config.provenance.trainer, seed
        if seed is not None and key in known:
            given = Raw(f"seed {seed}, as in {known[key]}")
            expected = "runs of one model and training that differ in their seed"
            raise UsageError(f"RUN {run}", given=given, expected=expected, fix="Leave one of them out.")
        known[key] = run
    with loading_torch():
        from export.papers.calculator.benchmark import definition
        from export.papers.calculator.run import CalculatorComparison
        from export.papers.experiment import run_experiment
    run_experiment(CalculatorComparison(runs, definition()), out, plots=plots, as_json=as_json)
