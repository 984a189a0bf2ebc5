"""The command ``fewheads calculator search``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, remark
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.figures import new_figure
from export.loading import loading_torch
from export.options import out_option, plots_option, seed_option, seeded
from export.papers.calculator.search.records import Found
from export.papers.calculator.search.space import EPOCHS, SPACES

BEST, TRIALS, FIGURE, SETTINGS = "best.json", "trials.json", "trials.png", "settings.json"


class Settings(msgspec.Struct, frozen=True):
    """What decides the trials in a directory, beside their number."""

    model: str
    seed: int
    epochs: int = EPOCHS


@click.command()
@click.argument("model", type=click.Choice(list(SPACES)))
@click.option(
    "--trials", type=click.IntRange(1), help="In all, with earlier ones.  [default: paper 000's 100, 50 or 20]"
)
@seed_option("For proposals, weights and the order of items.")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs that are trained as the best trial was, with seeds from --seed on.",
)
@out_option("Directory for all results; the same command resumes there, with more trials, too.")
@plots_option
@json_option
def search(model: str, trials: int | None, seed: int, seeds: int, out: Path, plots: bool, as_json: bool) -> None:
    """Search for the best shape of a calculator by Bayesian optimisation (TPE), as paper 000 does.

    Feed-forward networks have 1 to 16 layers of 1 to 512 units, with dropout of 0.1 or without; calculator-rnn2 has 1
    to 512 units. The other networks have small spaces of our own. The least error on validation wins. The best trial
    becomes a run directory below OUT, for `fewheads export`.
    """
    check_workspace("--out", out, {}, settings=SETTINGS)
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch():
        from export.papers.calculator.search.plot import draw
        from export.papers.calculator.search.study import Search
        from export.papers.calculator.train import train_run
        from export.papers.experiment import keep_settings
        from export.training.watch import watching_each
    keep_settings(out, Settings(model, seed))
    found = Search(model, out, seed)
    number = trials or SPACES[model].trials
    with watching_each("trials") as watch:
        found.run(number, lambda trial: watch(f"trial {trial + 1} of {number}"))
        records = found.trials
        better = found.better()
        write_whole(out / TRIALS, msgspec.json.format(msgspec.json.encode(records), indent=1))
        if plots:
            draw(records, out / FIGURE)
        runs = {}
        for one, name in seeded(model, seed, seeds).items():
            proposal = better[0].proposal
            runs[name] = train_run(
                model,
                out / name,
                seed=one,
                arguments=proposal.arguments,
                recipe=proposal.recipe,
                observer=watch(name),
            )
    result = Found(
        model=model,
        trials=len(records),
        diverged=sum(one.value is None for one in records),
        best=better[0],
        better=tuple(better[:10]),
        runs=runs,
    )
    write_whole(out / BEST, msgspec.json.format(msgspec.json.encode(result), indent=1))
    if as_json:
        print_json(result)
        return
    rows = [(one.number + 1, one.value, one.parameters, one.epochs, _described(one.values)) for one in result.better]
    title = f"{model}: the best of {result.trials} trials, {result.diverged} of which diverged"
    print_table(title, ("trial", "MSE on validation", "parameters", "epochs", "values"), rows)
    remark(f"written: {out / BEST}; the best one as {', '.join(str(out / name) for name in runs)}")


def _described(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value:.3g}" for name, value in values.items())
