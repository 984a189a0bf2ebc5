"""The command ``fewheads train``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.output import json_option, print_json, print_table
from edge.errors import UsageError
from export.bundle.outputs import check_run
from export.papers.calculator.specs import DEFAULT_NAMES, NAMES, SPECS
from export.papers.calculator.stack import NAMES as STACK_NAMES
from export.papers.looped import NAMES as LOOPED
from export.papers.looped import PREFIX
from export.papers.looped.options import LoopedOptions, looped_options
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import (
    device_option,
    replace_option,
    runs_option,
    seed_option,
    seeded,
    seeds_option,
    tensorboard_option,
)
from export.training.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.training.device import DeviceName
    from export.training.runs import RunMetrics

_ALL = "calculator"


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@seed_option("For weights and the order of items.")
@seeds_option
@click.option("--epochs", type=click.IntRange(1), help="Calculators: at most so many.  [default: 50 to 200, by model]")
@looped_options
@runs_option("the runs, each of which becomes OUT/MODEL")
@device_option
@tensorboard_option
@replace_option("earlier runs of the same models")
@json_option
def train(
    models: tuple[str, ...],
    seed: int,
    seeds: int,
    epochs: int | None,
    looped: LoopedOptions,
    out: Path,
    device: DeviceName,
    tensorboard: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Train models and write a run directory for each.

    MODEL is calculator-NAME, with oracle, gate, softmax-gate, term-network, baseline, fnn2, fnn3, rnn2, lstm, bilstm,
    gru, transformer4 or transformer5 for NAME; calculator for all of these; calculator-NAME with a control for NAME,
    rnn-prelu, lstm-public, lstm128, bilstm18 or transformer0; calculator-stack, which computes longer expressions;
    looped-linear, looped-sparse, looped-tree or looped-relu.
    """
    names = _names(models)
    if epochs and set(names) <= set(LOOPED):
        raise UsageError("--epochs", given=epochs, expected="a calculator among the models", fix="Give --steps.")
    looped.check(names)
    if device == "cuda" and (small := next((name for name in names if name in STACK_NAMES), None)):
        fix = "Leave --device out for it."
        raise UsageError("--device", given=device, expected=f"cpu for {small}, which is small", fix=fix)
    runs = {name: seeded(name, seed, seeds) for name in names}
    for run in (run for of_model in runs.values() for run in of_model.values()):
        check_run("--out", out / run, {}, replace=replace)
    with loading_torch():
        from export.papers.calculator.stack.train import train_stack
        from export.papers.calculator.train import train_run
        from export.papers.looped.recipes import training_plan
        from export.papers.looped.train import train_run as train_looped
        from export.training.intervals import pooled
    results = []
    for name in names:
        trained = []
        for one, run in runs[name].items():
            options: dict[str, Any] = {"seed": one, "tensorboard": tensorboard}
            with watching(run, lines=False) as watch:
                if name in LOOPED:
                    function = name.removeprefix(PREFIX)
                    plan = training_plan(function, looped)
                    metrics = train_looped(function, plan, out / run, device=device, observer=watch, **options)
                elif name in STACK_NAMES:
                    metrics = train_stack(name, out / run, epochs=epochs, observer=watch, **options)
                else:
                    metrics = train_run(name, out / run, epochs=epochs, device=device, observer=watch, **options)
            trained.append(metrics)
        results.append((name, [str(out / run) for run in runs[name].values()], pooled(trained)))
    if as_json:
        print_json([{"model": name, "runs": runs, "metrics": metrics} for name, runs, metrics in results])
        return
    for name, directories, metrics in results:
        (_print_calculator if name in SPECS else print_measures)(name, ", ".join(directories), metrics)


def _names(models: Sequence[str]) -> list[str]:
    names: dict[str, None] = {}
    for model in models:
        if model != _ALL and model not in (*NAMES, *STACK_NAMES, *LOOPED):
            choices = (_ALL, *NAMES, *STACK_NAMES, *LOOPED)
            close = difflib.get_close_matches(model, choices, n=1)
            fix = f"Did you mean {close[0]!r}?" if close else f"Take {_ALL!r} for all calculators of sums."
            raise UsageError("MODEL", given=model, expected=f"one of {', '.join(choices)}", fix=fix)
        names.update(dict.fromkeys(DEFAULT_NAMES if model == _ALL else [model]))
    return list(names)


def _print_calculator(name: str, runs: str, metrics: RunMetrics) -> None:
    """Print one row per split: its mean absolute error with its interval, the other metrics, the paper's figures.

    The scores follow, which are of several splits.
    """
    from export.papers.calculator.benchmark import PAPER_SCORE, SCORE, SPLIT

    paper = SPECS[name].paper
    measures = {(measure.metric, measure.split): measure for measure in metrics.measures}
    scores = [measures.pop((metric, SPLIT)) for metric in (SCORE, PAPER_SCORE)]
    others = list(dict.fromkeys(metric for metric, _ in measures if metric != "mae"))
    published = {} if paper is None else paper.errors()
    papers = list(dict.fromkeys(metric for metric, _ in published))
    rows = []
    for split in dict.fromkeys(split for _, split in measures):
        mae = measures["mae", split]
        low, high = mae.interval or (mae.value, mae.value)
        row = [split, f"{mae.value:.3g} ± {(high - low) / 2:.2g}"]
        row += [f"{measures[metric, split].value:.3g}" if (metric, split) in measures else "" for metric in others]
        row += [f"{published[metric, split]:.3g}" if (metric, split) in published else "" for metric in papers]
        rows.append(row)
    title = f"{name}: {metrics.parameters:,} parameters, {metrics.epochs} epochs, {metrics.seconds:.1f} s, in {runs}"
    heads = ("split", "mae ± 95 %", *(metric.replace("_", " ") for metric in others), *(f"paper's {m}" for m in papers))
    print_table(title, heads, rows)
    benchmark, papers_formula = (f"{one.value:.4g}" for one in scores)
    printed = "" if paper is None or paper.other_code else f", where the paper prints {paper.score:.4g}"
    click.echo(f"Score: {benchmark}; 1 is the baseline. By the paper's formula: {papers_formula}{printed}.")
    if paper is not None and not paper.other_code:
        click.echo("The paper's figure for long expressions comes from a slip in its code, not from its network.")
