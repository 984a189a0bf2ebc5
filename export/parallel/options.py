"""Options of commands that run jobs side by side."""

from __future__ import annotations

import click

jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1),
    show_default="the processor's cores, or the GPUs",
    help="Number of runs side by side, each with one thread or one GPU, and its log in OUT/logs. Times are measured at "
    "the end, one by one.",
)
ray_option = click.option(
    "--ray",
    metavar="ADDRESS",
    help="Run on a Ray cluster instead: its address, 'auto' for the one that this machine belongs to, or 'local' to "
    "start one here. All its machines need the working directory, the data and OUT at the same paths. Needs the extra "
    "'ray'.",
)
