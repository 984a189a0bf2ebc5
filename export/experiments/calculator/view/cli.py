"""The command ``fewheads calculator view``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.bundles.expression import parse
from edge.cli.output import json_option, print_json, print_table, progress, remark, working
from edge.errors import InvalidRequest, UsageError
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.figures import new_figure
from export.loading import loading_torch
from export.options import DIRECTORY, out_option, plots_option, seed_option
from export.papers.calculator.run_arguments import check_calculators

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.papers.calculator.view.report import View

VIEW = "view.json"


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=DIRECTORY)
@click.option("--expression", default="3 - -4 + 2", show_default=True, help="Show what is attended to in it.")
@click.option("--items", type=click.IntRange(2), default=200, show_default=True, help="Expressions of each length.")
@seed_option("For the expressions by length.")
@plots_option
@out_option("Directory for the results, RUN/view.json and pictures for each run. Earlier ones there are replaced.")
@json_option
def view(runs: tuple[Path, ...], expression: str, items: int, seed: int, plots: bool, out: Path, as_json: bool) -> None:
    """Show what calculators do, from runs of `fewheads train calculator-…`.

    The error by two operands from -10 to 10, of which -5 to 4 were trained; the error by the number of terms, with
    expressions that were never trained; and what networks with attention attend to in one expression.
    """
    names = _names(runs)
    check_workspace("--out", out, {f"RUN {run}": run for run in runs}, settings=f"*/{VIEW}")
    check_calculators(runs)
    try:
        parse(expression)
    except InvalidRequest as error:
        raise UsageError("--expression", given=error.given, expected=error.expected, fix=error.fix) from None
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch("loading torch and runs"):
        from export.papers.calculator.networks import NETWORKS
        from export.papers.calculator.view.report import view_of
        from export.training.checkpoint import load

        loaded = [load(run, NETWORKS)[:2] for run in runs]
    views = []
    with progress() as bar:
        task = bar.add_task("answers", total=len(runs), note="")
        for name, (model, config) in zip(names, loaded, strict=True):
            views.append(view_of(name, config.model, model, expression, items=items, seed=seed))
            bar.update(task, advance=1, note=name)
    for one in views:
        write_whole(out / one.run / VIEW, msgspec.json.encode(one))
    if plots:
        from export.papers.calculator.view.plot import draw, draw_together

        with progress() as bar:
            task = bar.add_task("pictures", total=len(views), note="")
            for one in views:
                draw(one, out)
                bar.update(task, advance=1, note=one.run)
        if len(views) > 1:
            with working("pictures of all runs"):
                draw_together(views, out)
    if as_json:
        print_json(views)
        return
    _print(views)
    remark(f"written: {out}")


def _names(runs: tuple[Path, ...]) -> list[str]:
    names = [run.resolve().name for run in runs]
    for name in names:
        if names.count(name) > 1:
            fix = "Give runs whose directories have different names."
            raise UsageError("RUN", given=name, expected="each name once, because its files go there", fix=fix)
    return names


def _print(views: list[View]) -> None:
    rows = []
    for one in views:
        for measure in one.by_terms:
            low, high = measure.interval or (measure.value, measure.value)
            row = (one.run, measure.split.removeprefix("terms/"), measure.n)
            rows.append((*row, f"{measure.value:.3g}", f"{low:.3g} … {high:.3g}"))
    print_table("Error by the number of terms", ("run", "terms", "n", "mae", "95 %"), rows)
