"""Options that several commands of the workstation share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from edge.errors import Raw, UsageError
from export.training.loading import loading_torch
from export.training.provenance import processor

#: Exists where the driver of a GPU is loaded; importing torch to find out would take seconds.
_GPU_DRIVER = Path("/proc/driver/nvidia/version")

F = TypeVar("F", bound=Callable[..., Any])

#: A directory that exists, and one that a command may make.
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_OUTPUT = click.Path(file_okay=False, path_type=Path)

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
#: For commands that read imported runs, which may record it.
imported_data_option = click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    help="Of an imported model: a file with a text in each line, two with a tab between them for pairs, or a directory "
    "of images; like those that the model will get, to calibrate and compare with.",
)


def replace_option(what: str) -> Callable[[F], F]:
    """Return ``--replace``, which lets a command replace earlier results; ``what`` names them."""
    return click.option("--replace", is_flag=True, help=f"Replace {what}; without it, the command refuses to.")


#: ``--final``, without which choices cannot be made by what is to be published.
final_option = click.option(
    "--final", is_flag=True, help="Measure dev, too, once every choice is made; without it, the hold-out alone."
)


def usable_precision(context: click.Context, option: object, precision: Any) -> Any:
    """Return fp32 or bf16: for auto, bf16 where the device that trains has instructions for it.

    Training took 12 times as long in emulated bfloat16 as in FP32. A processor whose flags are unknown trains in FP32
    unless bf16 is given.

    Raises:
        UsageError: bf16 is given, and the device has no instructions for it.
    """
    if precision == "fp32" or context.resilient_parsing:
        return precision
    gpu = _gpu() if context.params.get("device", "cpu") != "cpu" and _GPU_DRIVER.exists() else None
    here = processor()
    has_bf16 = gpu.has_bf16 if gpu else here.features and "BF16" in here.features
    if has_bf16 or (precision == "bf16" and gpu is None and here.features is None):
        return "bf16"
    if precision == "auto":
        return "fp32"
    if gpu:
        given, expected = f"bf16 on {gpu.name}", "a GPU of compute capability 8.0 or later"
    else:
        given = f"bf16 on a processor with these features: {here.described}"
        expected = "one with BF16, which are AVX512_BF16 or AMX_BF16 on x86 and bf16 on Arm"
    fix = "Leave --precision out: without it, this device trains in fp32, which is faster here."
    raise UsageError("--precision", given=Raw(given), expected=expected, fix=fix)


class _Gpu(NamedTuple):
    name: str
    has_bf16: bool


def _gpu() -> _Gpu | None:
    with loading_torch():
        import torch

        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return _Gpu(f"{torch.cuda.get_device_name()} of compute capability {major}.{minor}", major >= 8)


precision_option = partial(
    click.option,
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    callback=usable_precision,
    help="Precision of the multiplications in training; auto is bf16, which takes half the time, where the device has "
    "instructions for it, else fp32.",
)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    is_eager=True,  # the precision depends on it
    help="Device to train on; auto is the GPU where torch has one.",
)
tensorboard_option = click.option(
    "--tensorboard", type=_OUTPUT, help="Directory for TensorBoard's events, which log.jsonl in the run has, too."
)


def seed_option(what: str) -> Callable[[F], F]:
    """Return ``--seed``, 0 by default; ``what`` says what is drawn with it."""
    return click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help=what)


seeds_option = click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of runs, with seeds from --seed on; several go to NAME-seed0, …, and the table shows their means.",
)


def seeded(name: str, seed: int, seeds: int) -> dict[int, str]:
    """Return the name of the run with each seed of ``--seed`` and ``--seeds``."""
    return {one: name if seeds == 1 else f"{name}-seed{one}" for one in range(seed, seed + seeds)}


def out_option(what: str) -> Callable[[F], F]:
    """Return ``--out``, a directory that must be given; ``what`` describes it."""
    return click.option("--out", required=True, type=_OUTPUT, help=what)


def runs_option(what: str) -> Callable[[F], F]:
    """Return ``--out``, the directory ``runs`` by default; ``what`` names its runs."""
    text = f"Directory for {what}. An unfinished run of the same command is resumed."
    return click.option("--out", default="runs", show_default=True, type=_OUTPUT, help=text)


plots_option = click.option(
    "--plots/--no-plots", default=True, show_default=True, help="Draw PNG pictures; needs matplotlib."
)


def repository_option(which: str) -> Callable[[F], F]:
    """Return ``--repository``, of a command that makes bundles; ``which`` stands for one of them in the help."""
    text = f"Directory of the bundles; {which} becomes REPOSITORY/NAME-VERSION."
    return click.option("--repository", required=True, type=_OUTPUT, help=text)


version_option = click.option(
    "--version", type=click.IntRange(1), default=1, show_default=True, help="Version of the bundle."
)
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
