"""The command ``fewheads report``, and the reports of new runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import click

from edge.cli.output import json_option, print_json, remark, working
from edge.files import write_result
from export.bundle.outputs import check_file
from export.finetune import data_inputs, labelled_data
from export.report.drawing import new_figure
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, replace_option, run_data_dir_option
from export.training.runs import REPORT, recorded

_WITHOUT = "give --json without --out for the numbers alone"


@click.command()
@click.argument("run", type=DIRECTORY)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write, one HTML file; needs matplotlib.  [default: report.html in RUN if there is none yet; with "
    "--json no page]",
)
@run_data_dir_option
@replace_option("an earlier page")
@json_option
def report(run: Path, out: Path | None, data_dir: Path | None, replace: bool, as_json: bool) -> None:
    """Describe a fine-tuned run in numbers and on a page.

    Prints the metrics, and writes a page with classes, calibration, errors, training and the origin of the data, too.
    The page that `fewheads finetune` has written stays unless --replace is given. With --json it prints the page's
    numbers, and writes a page only at --out.
    """
    config = recorded(run)
    data_dir = labelled_data(config, data_dir)
    kept = run / REPORT
    if out is None and not as_json and (replace or not kept.exists()):
        out = kept
    if out:
        inputs = {**data_inputs(config, data_dir), "RUN": None if out.resolve() == kept.resolve() else run}
        check_file("--out", out, inputs, replace=replace)
        new_figure(1, 1, without=_WITHOUT)
    with loading_torch():
        from export.report.numbers import read_report
        from export.report.page import page_of
    with working(f"reporting on {run.name}"):
        numbers, items = read_report(run, data_dir)
        if out:
            write_result(out, page_of(numbers, items).encode())
    if as_json:
        print_json(numbers)
        return
    print_measures(numbers.task, numbers.run, numbers.metrics)
    click.echo(f"The page is {out}." if out else f"The page is {kept}, as before; --replace writes it again.")


def write_reports(runs: Sequence[Path], data_dir: Path) -> None:
    """Write the page of each new run into it; without matplotlib, only say how to get it."""
    if importlib.util.find_spec("matplotlib") is None:
        remark("no report.html: pip install 'fewheads[plot]', then run 'fewheads report RUN'")
        return
    from export.report.numbers import read_report
    from export.report.page import page_of

    for run in runs:
        with working(f"reporting on {run.name}"):
            write_result(run / REPORT, page_of(*read_report(run, data_dir)).encode())
