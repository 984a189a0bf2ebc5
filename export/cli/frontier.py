"""The command ``fewheads frontier``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.options import given_options
from edge.cli.output import json_option
from edge.errors import Raw, UsageError
from export.bundle.outputs import check_workspace
from export.finetune import AVERAGED, data_directory
from export.papers.experiment import SETTINGS
from export.report.drawing import new_figure
from export.training.loading import loading_torch
from export.training.options import (
    DIRECTORY,
    data_dir_option,
    device_option,
    jobs_option,
    out_option,
    plots_option,
    precision_option,
    ray_option,
)

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.training.device import DeviceName
    from export.training.recipe import Precision

#: Parameters of a command that trains nothing.
_OF_REPORTS = ("out", "only_report", "plots", "as_json")


@click.command()
@click.option("--model", type=DIRECTORY, help="The dense encoder: an imported run, or a Hugging Face directory.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=DIRECTORY,
    help="A run that `fewheads reduce --distil` restored from it, repeatable; its directory names the tier.",
)
@click.option(
    "--transfer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Unlabelled text, a passage in each line, to which teachers answer: short ones are drawn.",
)
@click.option("--control", help="Tier whose layers are also trained without restoration; by default, the second one.")
@click.option(
    "--task", "tasks", multiple=True, type=click.Choice(AVERAGED), help="A task, repeatable; all five by default."
)
@click.option(
    "--seeds", type=click.IntRange(1), help="Families of each task; 3 or 5 by default, as the settings have it."
)
@click.option("--epochs", type=click.IntRange(1), help="Length of each training; by default, the settings decide.")
@click.option("--limit", type=click.IntRange(1), help="Train on at most so many examples; all by default.")
@device_option
@precision_option()
@data_dir_option
@jobs_option
@ray_option
@out_option("Directory for all results; the same settings resume there, with more seeds, too, and others are refused.")
@click.option("--report", "only_report", is_flag=True, help="Train nothing: sum up the records in --out.")
@plots_option
@json_option
def frontier(
    model: Path | None,
    tiers: tuple[Path, ...],
    transfer: Path | None,
    control: str | None,
    tasks: tuple[str, ...],
    seeds: int | None,
    epochs: int | None,
    limit: int | None,
    device: DeviceName,
    precision: Precision,
    data_dir: Path,
    jobs: int | None,
    ray: str | None,
    out: Path,
    only_report: bool,
    plots: bool,
    as_json: bool,
) -> None:
    """Measure speed against accuracy of restored encoders on GLUE.

    On five tasks and several seeds, a teacher is fine-tuned; the dense encoder, the tiers that were restored from it,
    and the layers of one tier without restoration learn its answers, by one recipe; all are exported in FP32 and INT8.
    Then all files are timed in turns on ONNX Runtime. Writes records.jsonl, report.md and frontier.png.
    """
    if plots:
        new_figure(1, 1, without="give --no-plots")
    if only_report:
        _report(out, plots=plots, as_json=as_json)
        return
    for option, value in (("--model", model), ("--tier", tiers), ("--transfer", transfer)):
        if not value:
            fix = "Give all three, or --report to sum up earlier records."
            raise UsageError(option, given=Raw("nothing"), expected="an encoder, restored tiers and a text", fix=fix)
    assert model
    assert transfer
    named = {tier.resolve().name: tier for tier in tiers}
    if len(named) < len(tiers):
        fix = "Rename their directories, which name the tiers."
        raise UsageError("--tier", given=Raw(", ".join(map(str, tiers))), expected="runs of different names", fix=fix)
    data = {f"the data of {task} in": data_directory(task, data_dir) for task in tasks or AVERAGED}
    given = {"--model": model, "--transfer": transfer, **{f"--tier {name}": tier for name, tier in named.items()}}
    check_workspace("--out", out, {**given, **data}, settings=SETTINGS)
    changes = {"seeds": seeds, "limit": limit, "epochs": epochs, "teacher_epochs": epochs}
    with loading_torch("loading torch and data"):
        from export.papers.experiment import compute_parts, run_experiment
        from export.papers.frontier.records import Sources, frozen, settings_of
        from export.papers.frontier.run import Frontier
        from export.training.jobs import use_gpus

        gpu = use_gpus(device, ray)
        changed = frozen({name: value for name, value in changes.items() if value}, tasks)
        family_settings = msgspec.structs.replace(changed, precision=precision)
        sources = Sources(model, named, transfer, data_dir)
        settings = settings_of(family_settings, sources, control, "cuda" if gpu else "cpu")
    # Files are timed at the end, when nothing else runs.
    trainings = Frontier(settings, sources, out, trainings=True)
    compute_parts(trainings, out, as_jobs=True, jobs=jobs, ray=ray, gpu=gpu)
    run_experiment(Frontier(settings, sources, out), out, plots=plots, as_json=as_json)


def _report(out: Path, *, plots: bool, as_json: bool) -> None:
    for parameter in given_options():
        if parameter.name not in _OF_REPORTS:
            given, fix = Raw("an option of a training"), "Leave it out: the records have their settings."
            raise UsageError(parameter.opts[0], given=given, expected="nothing beside --report", fix=fix)
    with loading_torch("reading records"):
        from export.papers.experiment import read_settings, report_experiment
        from export.papers.frontier.records import ExperimentSettings
        from export.papers.frontier.run import Frontier

        experiment = Frontier(read_settings(out, ExperimentSettings))
    report_experiment(experiment, out, plots=plots, as_json=as_json)
