"""The command ``fewheads report``, and the reports of new runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, remark, working
from edge.files import write_result
from export.bundle.outputs import check_file
from export.figures import new_figure
from export.finetune import data_inputs, labelled_data
from export.loading import loading_torch
from export.measures import print_measures
from export.options import DIRECTORY, replace_option, run_data_dir_option
from export.training.runs import REPORT, recorded

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.report.numbers import Split
    from export.report.speed import Speed
    from export.training.intervals import Estimate, Mean

#: Errors in the table of a split; the page has more.
_SHOWN = 5
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
    """Describe a fine-tuned run: metrics, classes, calibration, errors, training and the origin of its data.

    Prints tables, and writes a page. The page that `fewheads finetune` has written stays unless --replace is given.
    With --json it prints the same numbers, and writes a page only at --out.
    """
    config = recorded(run)
    data_dir = labelled_data(config, data_dir)
    own = run / REPORT
    if out is None and not as_json and (replace or not own.exists()):
        out = own
    if out:
        inputs = {**data_inputs(config, data_dir), "RUN": None if out.resolve() == own.resolve() else run}
        check_file("--out", out, inputs, replace=replace)
        new_figure(1, 1, without=_WITHOUT)
    with loading_torch():
        from export.report.numbers import read_report
        from export.report.page import page_of
    with working(f"reporting on {run.name}"):
        found, items = read_report(run, data_dir)
        if out:
            write_result(out, page_of(found, items).encode())
    if as_json:
        print_json(found)
        return
    print_measures(found.task, found.run, found.metrics)
    _print_speed(found.speed)
    for split in found.splits:
        _print(split)
    rows = [(one.name, one.rows, one.in_train) for one in found.rows]
    title = "Data"
    if (trained_on := found.metrics.trained_on) is not None:
        title += f": the run was trained on {trained_on:,} of the {found.rows[0].rows:,} items of the training split"
    print_table(title, ("split", "items", "also in the training split"), rows)
    click.echo(f"The page is {out}." if out else f"The page is {own}, as before; --replace writes it again.")


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


def _print_speed(speed: Speed) -> None:
    if speed.measured:
        click.echo(
            f"Measured when it was reduced: {speed.measured.ratio:.2f} times as fast as the model that it was reduced "
            f"from, {speed.measured_where}, with ONNX Runtime on one thread."
        )
    where = f"TensorRT in FP16 on a {speed.device} at {speed.power_mode}"
    columns = ("tokens", "rows", "ms", "from", "to", "times faster")
    print_table(f"{where}: a {speed.label}", columns, map(msgspec.structs.astuple, speed.predicted))


def _print(split: Split) -> None:
    if split.classes:
        found = split.classes
        rows = [
            (one.label, one.train, one.n, one.predicted, _share(one.precision), _share(one.recall), one.f1)
            for one in found.rows
        ]
        title = (
            f"{split.name}, {split.n} items: always {found.majority!r} has an accuracy of {_share(found.baseline)}; "
            f"expected calibration error {found.calibration_error:.3f}"
        )
        columns = ("class", "training split", "items", "predicted", "precision", "recall", "F1")
        print_table(title, columns, rows)
    if split.values:
        values = split.values
        title = f"{split.name}, {split.n} items: root mean squared error {_share(values.rmse)}"
        print_table(title, ("RMSE of the training mean", "bias"), [(_share(values.baseline), _share(values.bias))])
    found_errors = (split.classes or split.values).errors  # type: ignore[union-attr]
    rows_of_errors = [
        (" | ".join(one.item)[:200], one.target, one.prediction, one.confidence) for one in found_errors[:_SHOWN]
    ]
    if not rows_of_errors:
        click.echo(f"{split.name}: no wrong answers")
        return
    heads = ("item", "in the data", "predicted", "probability")
    worst = "most confident wrong answers" if split.classes else "largest residuals"
    print_table(f"{split.name}: {worst}", heads, rows_of_errors)


def _share(one: Mean | Estimate | None) -> str | None:
    from export.training.intervals import with_interval

    return None if one is None else with_interval(one.value, one.interval, "{:.3f}".format)
