"""The command ``fewheads calculator compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, progress, remark
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.figures import new_figure
from export.loading import loading_torch
from export.options import DIRECTORY, out_option, plots_option
from export.papers.calculator.run_arguments import check_calculators

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.papers.calculator.comparison.results import Results

RESULTS, REPORT = "results.json", "report.md"
_REPOSITORY, _ANSWERS, _MEASUREMENTS = "repository", "answers", "measurements.json"


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=DIRECTORY)
@click.option(
    "--latency/--no-latency",
    default=True,
    show_default=True,
    help="Measure latency and memory, by `fewheads bench` in processes of their own.",
)
@click.option(
    "--requests",
    type=click.IntRange(10),
    default=1000,
    show_default=True,
    help="Of one expression, to each model in a round; a tenth as many have 64 expressions.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Repetitions, whose spread is shown."
)
@plots_option
@out_option("Directory for all results. The same command resumes there; what was measured is not measured again.")
@json_option
def compare(
    runs: tuple[Path, ...], latency: bool, requests: int, rounds: int, plots: bool, out: Path, as_json: bool
) -> None:
    """Compare calculators: accuracy, the benchmark's scores, and what an answer costs.

    Runs of one model and training are its seeds. The first of each becomes a bundle in OUT/repository, whose latency is
    measured in process and served. Writes results.json, report.md and figures.
    """
    check_workspace("--out", out, {f"RUN {run}": run for run in runs}, settings="settings.json")
    check_calculators(runs)
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch():
        from export.papers.calculator.comparison.cost import ROWS, costs_of, export_groups, measure
        from export.papers.calculator.comparison.report import report_of
        from export.papers.calculator.comparison.results import Results, Settings
        from export.papers.calculator.comparison.summary import reference_of, summary_of
        from export.papers.calculator.data import load
        from export.papers.calculator.runs import grouped, open_runs
        from export.papers.experiment import keep_settings
        from export.training.provenance import processor
    settings = Settings(requests, rounds)
    keep_settings(out, settings)
    splits = load()
    groups = grouped(open_runs(runs, splits, out / _ANSWERS))
    reference = reference_of(groups)
    with progress() as bar:
        task = bar.add_task("exporting", total=len(groups), note="")
        bundles = export_groups(groups, out / _REPOSITORY, lambda model: bar.update(task, advance=1, note=model))
    measured = None
    if latency:
        steps = rounds * (len(ROWS) + 1)
        # The measuring processes have progress bars of their own on stderr.
        numbers = iter(range(1, steps + 1))
        measured = measure(
            bundles,
            out / _MEASUREMENTS,
            requests=requests,
            rounds=rounds,
            on_step=lambda what: remark(f"{next(numbers)} of {steps}: {what}"),
        )
    models = summary_of(groups, splits, costs_of(bundles, measured, reference))
    results = Results(settings, reference, models, processor())
    write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1))
    figures = []
    if plots:
        from export.papers.calculator.comparison.plot import draw

        figures = [path.name for path in draw(results, out)]
    write_whole(out / REPORT, report_of(results, figures).encode())
    if as_json:
        print_json(results)
        return
    _print(results)
    remark(f"written: {out / REPORT}")


def _print(results: Results) -> None:
    from export.training.intervals import with_interval

    rows = []
    for model in results.models:
        found = {(one.metric, one.split): one for one in model.measures}
        score = found["score", "benchmark"]
        interval = score.interval or (score.value, score.value)
        served = model.cost.latencies.get(1)
        rows.append(
            (
                model.name,
                model.parameters,
                model.seeds,
                *(found["mae", split].value for split in ("in_range", "out_of_range", "long/4-8")),
                with_interval(score.value, interval, "{:.4g}".format),
                model.cost.mflop,
                served and served.served.median,
            )
        )
    heads = ("model", "parameters", "seeds", "MAE in range", "out of range", "4 to 8 terms", "score", "MFLOP")
    print_table("Calculators", (*heads, "served ms"), rows)
