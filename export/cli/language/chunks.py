"""The command ``fewheads language chunks``."""

from __future__ import annotations

from pathlib import Path

import click

from edge.cli.output import json_option
from export.bundle.outputs import check_workspace
from export.cli.language.shared import resumed_option
from export.papers.experiment import SETTINGS
from export.training.loading import loading_torch
from export.training.options import plots_option
from export.training.provenance import processor


@click.command()
@click.option("--vocabulary", type=click.IntRange(1), default=50_257, show_default=True, help="Tokens; GPT-2's.")
@click.option("--width", type=click.IntRange(1), default=768, show_default=True, help="Of embeddings and states.")
@click.option(
    "--chunk",
    "sizes",
    type=click.IntRange(1),
    multiple=True,
    help="Tokens in a chunk. Repeatable.  [default: powers of 2 from 256, and all]",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Processes for each size.")
@resumed_option
@plots_option
@json_option
def chunks(
    vocabulary: int, width: int, sizes: tuple[int, ...], repeats: int, out: Path, plots: bool, as_json: bool
) -> None:
    """Measure the memory of a head's training by chunks of the vocabulary.

    Each step is in a process of its own, with random states and weights. Writes records.jsonl, report.md and a figure.
    """
    check_workspace("--out", out, {}, settings=SETTINGS)
    with loading_torch():
        from export.papers.backward.chunks import ChunkMemory, ChunkSettings
        from export.papers.experiment import compute_parts, report_experiment

    powers = [2**power for power in range(8, 17) if 2**power < vocabulary]
    settings = ChunkSettings(
        vocabulary=vocabulary,
        width=width,
        chunks=(0, *(sizes or (*powers, vocabulary))),
        repeats=repeats,
        processor=processor(),
    )
    experiment = ChunkMemory(settings)
    compute_parts(experiment, out, as_jobs=True, jobs=1)
    report_experiment(experiment, out, plots=plots, as_json=as_json)
