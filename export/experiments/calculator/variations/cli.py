"""The commands ``fewheads calculator vary`` and ``fewheads calculator benchmark-loss``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, remark
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.figures import new_figure
from export.loading import loading_torch
from export.options import out_option, plots_option
from export.papers.calculator.specs import NAMES, SPECS
from export.papers.calculator.variations.grid import FNN2, PRODUCT, Variant, losses, variations

RESULTS, REPORT, FIGURE, SETTINGS = "results.json", "report.md", "errors.png", "settings.json"
_OUT = "Directory for all results; the same command resumes there, with more seeds, too."

seeds_option = click.option(
    "--seeds", type=click.IntRange(1), default=5, show_default=True, help="Runs of each setting, seeds from 0 on."
)
out_directory = out_option(_OUT)


class Settings(msgspec.Struct, frozen=True):
    """What the parts in a directory are of: the command, and the model that it varies."""

    command: str
    model: str


@click.command()
@seeds_option
@out_directory
@plots_option
@json_option
def vary(seeds: int, out: Path, plots: bool, as_json: bool) -> None:
    """Train FNN2 with other activations, optimisers, dropout, training data, tokens, padding and embeddings.

    These are the directions that paper 000 names as future work. One factor changes at a time; activations, optimisers
    and three learning rates are also combined, with at most three seeds. Writes results.json and report.md.
    """
    _run("vary", FNN2, variations(), seeds, out, plots=plots, as_json=as_json)


@click.command("benchmark-loss")
@click.option(
    "--model",
    type=click.Choice([name for name in NAMES if SPECS[name].recipe]),
    default=FNN2,
    show_default=True,
    help="To train.",
)
@seeds_option
@out_directory
@plots_option
@json_option
def benchmark_loss(model: str, seeds: int, out: Path, plots: bool, as_json: bool) -> None:
    """Train a calculator with paper 000's benchmark as its loss, on generated items that the benchmark lacks.

    The same items with a squared and with an absolute error show what the loss adds to the data. Writes results.json
    and report.md.
    """
    _run("benchmark-loss", model, losses(model), seeds, out, plots=plots, as_json=as_json)


def _run(
    command: str, model: str, variants: Sequence[Variant], seeds: int, out: Path, *, plots: bool, as_json: bool
) -> None:
    check_workspace("--out", out, {}, settings=SETTINGS)
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch():
        from export.papers.calculator.variations.parts import Part, parts
        from export.papers.calculator.variations.plot import draw
        from export.papers.calculator.variations.report import HEADS, cells_of, report_of
        from export.papers.calculator.variations.results import results_of
        from export.papers.experiment import each_part, keep_settings
    keep_settings(out, Settings(command, model))
    number = sum(one.seeds(seeds) for one in variants)
    found: list[Part] = []
    for some in each_part(partial(parts, variants, seeds, out), number):
        found = some
    results = results_of(found)
    write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1))
    write_whole(out / REPORT, report_of(results, command, FIGURE if plots else None).encode())
    if plots:
        draw(results, out / FIGURE)
    if as_json:
        print_json(results)
        return
    shown = [row for row in results.rows if row.factor != PRODUCT] + [*results.cells]
    print_table(f"{model}: runs in {out}", HEADS, [cells_of(row) for row in shown])
    click.echo(results.verdict)
    remark(f"written: {out / REPORT}")
