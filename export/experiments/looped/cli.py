"""The command ``fewheads looped``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, progress, remark, working
from edge.errors import Raw, UsageError
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.figures import new_figure
from export.loading import loading_torch
from export.options import DIRECTORY, out_option, plots_option

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.papers.looped.results import Results

RESULTS, REPORT = "results.json", "report.md"
#: Packages of the baselines, and their names for pip.
_PACKAGES = {"sklearn": "scikit-learn", "xgboost": "xgboost-cpu"}


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=DIRECTORY)
@click.option("--prompts", type=click.IntRange(2), default=1280, show_default=True, help="Prompts of each experiment.")
@click.option("--loops", type=click.IntRange(1), default=120, show_default=True, help="Run looped models so long.")
@plots_option
@out_option("Directory for all results. What is computed there is not computed again, with other runs beside, too.")
@json_option
def looped(runs: tuple[Path, ...], prompts: int, loops: int, plots: bool, out: Path, as_json: bool) -> None:
    """Repeat paper 003's experiments with runs of `fewheads train looped-…`, looped and --unlooped.

    Runs of the same shape and training count as seeds of one model. For each function class, the looped and the
    unlooped model with most seeds, or the first of them, are compared with each other, with the baselines and with the
    published errors. Further shapes (--layers, --dim, --injection) have curves of their own. Writes results.json,
    report.md and figures.
    """
    check_workspace("--out", out, {f"RUN {run}": run for run in runs}, settings="settings.json")
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            fix = "Install the baselines: pip install 'fewheads[baselines]'."
            raise UsageError(package, given=Raw("not installed"), expected="the package", fix=fix)
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch("loading torch and runs"):
        from export.papers.experiment import keep_settings
        from export.papers.looped.parts import Key, compute, parts_of
        from export.papers.looped.report import report_of
        from export.papers.looped.results import Results, Settings
        from export.papers.looped.runs import open_runs
        from export.papers.looped.summary import summary_of
        from export.training.provenance import processor

        settings = Settings(prompts, loops)
        tasks = open_runs(runs)
        keep_settings(out, settings)
    found = []
    for task, groups in tasks.items():
        parts = parts_of(task, groups, prompts=prompts, loops=loops)
        with progress() as bar:
            bar_task = bar.add_task(task.name, total=len(parts), note="")

            def on_part(key: Key) -> None:
                bar.update(bar_task, advance=1, note=" ".join(key))  # noqa: B023 (called within the block)

            arrays = compute(parts, out, on_part)
        with working(f"{task.name}: summing up"):
            found.append(summary_of(task, groups, arrays))
    results = Results(settings, tuple(found), processor())
    write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1))
    figures = []
    if plots:
        from export.papers.looped.plot import draw

        with working("drawing"):
            figures = [path.name for result in results.tasks for path in draw(result, out)]
    write_whole(out / REPORT, report_of(results, figures).encode())
    if as_json:
        print_json(results)
        return
    _print(results)
    remark(f"written: {out / REPORT}")


def _print(results: Results) -> None:
    from export.papers.looped.report import verdict

    for task in results.tasks:
        title = f"{task.function}, d = {task.dims}: error after {task.points - 1} pairs"
        rows = [
            (group.name, group.seeds, group.parameters, group.loops, group.error, *group.interval, group.longest)
            for group in task.groups
        ]
        heads = (
            "model",
            "seeds",
            "parameters",
            "loops",
            "error",
            "from",
            "to",
            f"after {results.settings.loops} loops",
        )
        print_table(title, heads, rows)
        against = [(one.other, one.error, one.difference.value, *one.difference.interval) for one in task.against]
        if against:
            print_table(f"{task.looped} against", ("other", "its error", "difference", "from", "to"), against)
            click.echo(verdict(task))
