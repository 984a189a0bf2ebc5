"""Options that several commands of the workstation share, so that they mean the same everywhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

data_dir_option = click.option(
    "--data-dir",
    default="data",
    show_default=True,
    envvar="FEWHEADS_DATA",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Holds glue/TASK/train.tsv and dev.tsv, from gluebenchmark.com/tasks, and squad/, mnist/ and imagenet/.",
)
precision_option = partial(
    click.option,
    "--precision",
    type=click.Choice(["fp32", "bf16"]),
    show_default=True,
    help="Of the multiplications in training; bf16 takes half the time where the processor has it.",
)
seeds_option = click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Train so many times, from --seed on, into NAME-seed0, …, and show the means over the seeds.",
)
