"""The command ``fewheads language compare``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, remark
from edge.errors import UsageError
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.figures import new_figure
from export.loading import loading_torch
from export.options import DIRECTORY, device_option, out_option, plots_option

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.papers.backward.compare.parts import Experiment
    from export.papers.backward.compare.records import Part, Settings
    from export.papers.backward.compare.summary import Results
    from export.training.device import DeviceName

RESULTS, REPORT, CHANGES = "results.json", "report.md", "changes.json"


@click.command()
@click.argument("backbone", type=DIRECTORY)
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIRECTORY/MODULE",
    help="A task: DIRECTORY has train*/MODULE.txt and interpolate/MODULE.txt of the mathematics dataset. Repeatable.",
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each, seeds from 0 on.")
@click.option("--limit", type=click.IntRange(1), default=10_000, show_default=True, help="Examples to train on.")
@click.option("--epochs", type=click.IntRange(1), default=2, show_default=True, help="Passes over them.")
@click.option("--items", type=click.IntRange(1), default=300, show_default=True, help="Test examples to answer.")
@plots_option
@out_option("Directory for all results; a comparison with the same options resumes there, with more seeds, too.")
@device_option
@json_option
def compare(
    backbone: Path,
    data: tuple[Path, ...],
    seeds: int,
    limit: int,
    epochs: int,
    items: int,
    plots: bool,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Compare a head of backward attention on BACKBONE, which stays as it is, with simpler ways to improve it.

    On each task, every way gets the same training data and a learning rate chosen on a hold-out, and is scored once on
    the test split. Writes results.json and report.md after each part, the heads, and in the end changes.json and
    pictures.
    """
    check_workspace(
        "--out", out, {"BACKBONE": backbone, **{f"--data {one}": one.parent for one in data}}, settings="settings.json"
    )
    names = [one.name for one in data]
    if len({*names}) < len(names):
        fix = "Give each module once."
        raise UsageError("--data", given=", ".join(names), expected="modules of different names", fix=fix)
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch("loading torch, model and data"):
        from export.generate.backbone import positions_of
        from export.generate.base import Base
        from export.papers.backward.compare.methods import METHODS
        from export.papers.backward.compare.parts import Experiment
        from export.papers.backward.compare.records import Settings
        from export.papers.backward.compare.tasks import read_task
        from export.papers.experiment import digest, each_part, keep_settings

        base = Base(backbone, device)
        tasks = [read_task(one, base.tokenizer, positions_of(base.model), limit) for one in data]
        hashes = {one.name: digest(one.parent, f"*/{one.name}.txt") for one in data}
        settings = Settings(backbone=base.identity.sha256, data=hashes, limit=limit, epochs=epochs, items=items)
        keep_settings(out, settings)
    experiment = Experiment(base, tasks, settings, out)
    number = len(tasks) * sum(seeds if method.is_random else 1 for method in METHODS)
    for parts in each_part(partial(experiment.parts, seeds), number):
        results = _write(experiment, settings, parts, out, missing=number - len(parts))
    _finish(experiment, results, parts, out, plots=plots)
    if as_json:
        print_json(results)
        return
    _print(results)
    remark(f"written: {out / REPORT}")


def _write(experiment: Experiment, settings: Settings, parts: list[Part], out: Path, *, missing: int) -> Results:
    from export.papers.backward.compare.report import report_of
    from export.papers.backward.compare.summary import Results, outcomes, rows_of, verdict
    from export.training.provenance import processor

    rows = rows_of(experiment.tasks, parts)
    results = Results(experiment.base.identity, settings, missing, verdict(rows), outcomes(rows), rows, processor())
    write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1))
    write_whole(out / REPORT, report_of(results, (), ()).encode())
    return results


def _finish(experiment: Experiment, results: Results, parts: list[Part], out: Path, *, plots: bool) -> None:
    from export.papers.backward.compare.changes import changes_of
    from export.papers.backward.compare.plot import draw
    from export.papers.backward.compare.report import report_of

    changes = [changes_of(experiment, task, parts) for task in experiment.tasks]
    write_whole(out / CHANGES, msgspec.json.format(msgspec.json.encode(changes), indent=1))
    figures = [draw(one, out).name for one in changes] if plots else []
    write_whole(out / REPORT, report_of(results, changes, figures).encode())


def _print(results: Results) -> None:
    rows = [
        (
            row.task,
            row.method,
            row.parameters,
            row.cross_entropy and row.cross_entropy.value,
            row.exact_match.value,
            *row.exact_match.interval,
        )
        for row in results.rows
    ]
    heads = ("task", "method", "trained parameters", "cross-entropy", "exact match", "from", "to")
    print_table(f"on {results.base.name}", heads, rows)
    click.echo(results.verdict)
