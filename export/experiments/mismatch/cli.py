"""The command ``fewheads language mismatch``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, remark
from edge.files import sha256, write_whole
from export.bundle.outputs import check_workspace
from export.commands.language import limit_option
from export.commands.language_finetune import RATE
from export.figures import new_figure
from export.generate.formats import source_of
from export.loading import loading_torch
from export.options import device_option

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.papers.backward.mismatch.parts import Experiment
    from export.papers.backward.mismatch.records import Part, Settings
    from export.papers.backward.mismatch.results import Results
    from export.training.device import DeviceName

RESULTS, REPORT, FIGURE = "results.json", "report.md", "path.png"


@click.command()
@click.argument("backbone", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--data",
    multiple=True,
    default=("calculator:train",),
    show_default=True,
    metavar="FORMAT:PATH",
    help="To train on, as of `fewheads language finetune`; a tenth is held out. Repeatable.",
)
@click.option(
    "--test",
    "tests",
    multiple=True,
    default=("calculator:in_range", "calculator:out_of_range", "calculator:long"),
    show_default=True,
    metavar="FORMAT:PATH",
    help="To answer, beside the data that are trained on. Repeatable.",
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each, seeds from 0 on.")
@click.option("--rank", type=click.IntRange(1), default=32, show_default=True, help="Of the adapters; the paper's.")
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True, help="Passes; the best one is kept.")
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), default=RATE, show_default=True, help="Peak learning rate."
)
@limit_option
@click.option("--plots/--no-plots", default=True, show_default=True, help="Draw a PNG picture; needs matplotlib.")
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for all results; the same options resume there, with more seeds, too.",
)
@device_option
@json_option
def mismatch(
    backbone: Path,
    data: tuple[str, ...],
    tests: tuple[str, ...],
    seeds: int,
    rank: int,
    epochs: int,
    lr: float,
    limit: int | None,
    plots: bool,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Find what a fine-tuned model loses between the accuracy in its training and that in use (paper 000).

    Trains LoRA adapters on BACKBONE in FP32 and rounded to NF4. Each is scored on the base of its training and merged
    into the FP32 base, with the begin token once and twice, teacher-forced and written freely. Writes results.json and
    report.md after each part.
    """
    sources, splits = [source_of(one) for one in data], [source_of(one) for one in tests]
    inputs = {"BACKBONE": backbone}
    inputs |= {str(one): Path(one.path) for one in (*sources, *splits) if one.format != "calculator"}
    check_workspace("--out", out, inputs, settings="settings.json")
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch("loading torch, model and data"):
        from export.generate.base import Base
        from export.generate.formats import read_source
        from export.generate.train import read_corpus
        from export.papers.backward.mismatch.parts import BASES, Experiment, begin_of
        from export.papers.backward.mismatch.records import Settings
        from export.papers.experiment import each_part, keep_settings

        base = Base(backbone, device)
        corpus = read_corpus(sources, seed=0, limit=limit)
        read = {name: some for one in splits for name, some in read_source(one, limit).items()}
        hashes = {name: sha256(msgspec.json.encode(some)) for name, some in {"train": corpus.train, **read}.items()}
        settings = Settings(
            backbone=base.identity.sha256,
            data=hashes,
            begin=begin_of(base.tokenizer),
            rank=rank,
            epochs=epochs,
            rate=lr,
        )
        keep_settings(out, settings)
        experiment = Experiment(base, corpus, read, settings, out)
    number = seeds * len(BASES)
    for parts in each_part(partial(experiment.parts, seeds), number):
        results = _write(experiment, settings, parts, out, missing=number - len(parts), plots=plots)
    if as_json:
        print_json(results)
        return
    _print(results)
    remark(f"written: {out / REPORT}")


def _write(
    experiment: Experiment, settings: Settings, parts: list[Part], out: Path, *, missing: int, plots: bool
) -> Results:
    from export.papers.backward.mismatch.plot import draw
    from export.papers.backward.mismatch.report import report_of
    from export.papers.backward.mismatch.results import Results
    from export.papers.backward.mismatch.summary import Summary
    from export.training.provenance import processor

    summary = Summary(parts, list(experiment.splits)[1:])
    agreements, completions = summary.agreements
    results = Results(
        base=experiment.base.identity,
        settings=settings,
        missing=missing,
        verdict=summary.verdict(),
        rows=summary.rows,
        effects=summary.effects,
        path=summary.path,
        agreements=agreements,
        completions=completions,
        processor=processor(),
    )
    figure = FIGURE if plots and results.path else None
    if figure:
        draw(results.path, out / figure)
    write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1))
    write_whole(out / REPORT, report_of(results, figure).encode())
    return results


def _print(results: Results) -> None:
    from export.training.intervals import points

    rows = [
        (step.name, step.split, step.accuracy.value, points(step.change) if step.change else "")
        for step in results.path
    ]
    print_table(f"adapters of the NF4 base, on {results.base.name}", ("step", "data", "accuracy", "points"), rows)
    click.echo(results.verdict)
