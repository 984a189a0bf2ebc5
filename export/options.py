"""Options that several commands of the workstation share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from edge.cli.output import remark
from export.processor import processor

#: Exists where the driver of a GPU is loaded; importing torch to find out would take seconds.
_GPU_DRIVER = Path("/proc/driver/nvidia/version")

F = TypeVar("F", bound=Callable[..., Any])

data_dir_option = click.option(
    "--data-dir",
    default="data",
    show_default=True,
    envvar="FEWHEADS_DATA",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Holds glue/TASK/train.tsv and dev.tsv, from gluebenchmark.com/tasks, and squad/, mnist/ and imagenet/.",
)
#: For commands that read a run, which records its data directory.
run_data_dir_option = click.option(
    "--data-dir",
    envvar="FEWHEADS_DATA",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Where the task's data are; by default where they were when the run was trained.",
)


def replace_option(what: str) -> Callable[[F], F]:
    """Return ``--replace``, which lets a command replace earlier results; ``what`` names them."""
    return click.option("--replace", is_flag=True, help=f"Replace {what}; without it, the command refuses to.")


def usable_precision(context: click.Context, option: object, precision: Any) -> Any:
    """Return fp32, with a warning, where bf16 is given and the processor that trains has no instructions for it.

    Training took 12 times as long in emulated bfloat16 as in FP32. A processor whose flags are unknown trains in the
    precision given.
    """
    here = processor()
    on_gpu = context.params.get("device", "cpu") != "cpu" and _GPU_DRIVER.exists()
    if precision != "bf16" or on_gpu or here.features is None or "BF16" in here.features:
        return precision
    remark(
        f"--precision: got bf16, expected a processor with BF16 instructions; this one has: {here.described}. "
        "Trains in fp32, which is faster here; give --precision fp32 to leave this warning out."
    )
    return "fp32"


precision_option = partial(
    click.option,
    "--precision",
    type=click.Choice(["fp32", "bf16"]),
    show_default=True,
    callback=usable_precision,
    help="Precision of the multiplications in training; bf16 takes half the time on processors with BF16 "
    "instructions and becomes fp32 on others.",
)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    is_eager=True,  # the precision's warning depends on it
    help="Device to train on; auto is the GPU where torch has one.",
)
tensorboard_option = click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for TensorBoard's events, which log.jsonl in the run has, too.",
)
seeds_option = click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of runs, with seeds from --seed on; several go to NAME-seed0, …, and the table shows their means.",
)
