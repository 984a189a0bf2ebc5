"""The command ``fewheads frontier``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from edge.cli.options import given_options
from edge.cli.output import json_option, print_json, print_table, remark, working
from edge.errors import Raw, UsageError
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.commands.reduce_options import LATENCIES
from export.figures import new_figure
from export.finetune import AVERAGED, data_directory
from export.loading import loading_torch
from export.options import (
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
    from export.papers.frontier.records import Family
    from export.papers.frontier.settings import FamilySettings, FrontierSettings, TaskSettings
    from export.papers.frontier.summary import Frontier
    from export.training.device import DeviceName
    from export.training.intervals import Difference
    from export.training.recipe import Precision

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
#: Parameters of a command that trains nothing.
_OF_REPORTS = ("out", "only_report", "plots", "as_json")


@click.command()
@click.option("--model", type=DIRECTORY, help="Hugging Face directory that all runs start from.")
@click.option(
    "--task", "tasks", multiple=True, type=click.Choice(AVERAGED), help="A task, repeatable; all five by default."
)
@click.option("--settings", "path", type=_FILE, help="Other settings than the published ones, as JSON.")
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
@out_option("Directory for all results; families with the same settings resume there, others are refused.")
@click.option("--report", "only_report", is_flag=True, help="Train nothing: sum up the records in --out.")
@plots_option
@json_option
def frontier(
    model: Path | None,
    tasks: tuple[str, ...],
    path: Path | None,
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
    """Measure speed against accuracy: dense models, leaner ones, and simple reductions of the same speed.

    On five tasks of GLUE and several seeds, each family is trained, reduced, distilled, and exported in FP32 and INT8;
    then all files are timed in turns on ONNX Runtime. Writes frontier.json, report.md and frontier.png. A family takes
    20 to 80 minutes of a core.
    """
    if plots:
        new_figure(1, 1, without="give --no-plots")
    if only_report:
        _check_only_report()
        families = _recorded(out)
    else:
        if model is None:
            fix = "Give the directory of a BERT, or --report to sum up earlier records."
            raise UsageError("--model", given=Raw("nothing"), expected="a Hugging Face directory", fix=fix)
        data = {f"the data of {task} in": data_directory(task, data_dir) for task in tasks or AVERAGED}
        check_workspace("--out", out, {"--model": model, **data}, settings=LATENCIES)
        lengths = dict.fromkeys(("epochs", "teacher_epochs", "reduced_epochs"), epochs)
        changes = {"seeds": seeds, "limit": limit, **lengths}
        given = {name: value for name, value in changes.items() if value}
        where = _Where(device, jobs, ray)
        planned = _planned(path, given, tasks, precision, model, data_dir, where)
        families = _measured(planned, model, data_dir, out, where)
    with working("summing up"):
        found = _summed_up(families)
        _write(found, out, plots=plots)
    if as_json:
        print_json(found)
        return
    _print(found)


def _check_only_report() -> None:
    for parameter in given_options():
        if parameter.name not in _OF_REPORTS:
            given, fix = Raw("an option of a training"), "Leave it out: the records have their settings."
            raise UsageError(parameter.opts[0], given=given, expected="nothing beside --report", fix=fix)


def _planned(
    path: Path | None,
    changes: dict[str, Any],
    tasks: tuple[str, ...],
    precision: Precision,
    model: Path,
    data_dir: Path,
    where: _Where,
) -> list[FamilySettings]:
    with loading_torch("loading torch and data"):
        from export.papers.frontier.settings import FROZEN, families_of, read_settings
        from export.training.jobs import use_gpus

        settings = msgspec.structs.replace(read_settings(path or FROZEN, changes, tasks), precision=precision)
        return families_of(settings, model, data_dir, "cuda" if use_gpus(where.device, where.ray) else "cpu")


class _Where(NamedTuple):
    device: DeviceName
    jobs: int | None
    ray: str | None


def _measured(families: list[FamilySettings], model: Path, data_dir: Path, out: Path, where: _Where) -> list[Family]:
    from export.papers.experiment import check_settings
    from export.papers.frontier.family import family_directory, family_inputs, time_shapes
    from export.papers.frontier.family_job import train_family
    from export.papers.frontier.records import ANSWERED, TIMED, read_family
    from export.papers.frontier.timing import time_files
    from export.training.jobs import Job, run_jobs
    from export.training.watch import watching

    directories = [family_directory(out, family.task, family.seed) for family in families]
    for family, directory in zip(families, directories, strict=True):  # all of them, before the first is trained
        check_settings(directory, family, unused=family.counts)
    if not all((directory / ANSWERED).exists() for directory in directories):
        out.mkdir(parents=True, exist_ok=True)
        with watching("shapes") as watch:
            time_shapes(model, out, families[0].frontier.tokens, partial(watch.on_part, "shapes timed"))
    run_jobs(
        [
            Job(directory.name, train_family, (family, model, data_dir, directory))
            for family, directory in zip(families, directories, strict=True)
            if not (directory / ANSWERED).exists()
        ],
        logs=out / "logs",
        workers=where.jobs,
        ray=where.ray,
        gpu=families[0].device == "cuda",
    )
    for family, directory in zip(families, directories, strict=True):
        if (directory / TIMED).exists():
            remark(f"{directory.name}: timed earlier")
            continue
        with watching(f"{directory.name}/times") as watch:
            inputs = family_inputs(family, model, data_dir)
            time_files(family, inputs, directory, partial(watch.on_part, "items"))
    return [read_family(directory) for directory in directories]


def _joined(families: list[FamilySettings]) -> FrontierSettings:
    """Return the settings of all families, with the largest numbers of seeds that one of them was trained for."""
    first = families[0]
    known: dict[str, tuple[TaskSettings, str]] = {}
    tasks: dict[str, TaskSettings] = {}
    for family in families:
        common = msgspec.structs.replace(family.frontier, tasks=first.frontier.tasks)
        own = msgspec.structs.replace(family.own, seeds=1, controls={}), family.data
        alike = (first.frontier, first.model, first.versions, known.setdefault(family.task, own))
        if (common, family.model, family.versions, own) != alike:
            given = Raw("other settings, data, versions or another model than other families there")
            fix = "Move them to a directory of their own."
            subject, expected = f"family {family.task}-seed{family.seed}", "the same for all families"
            raise UsageError(subject, given=given, expected=expected, fix=fix)
        tasks[family.task] = max(tasks.get(family.task, family.own), family.own, key=lambda own: own.seeds)
    return msgspec.structs.replace(first.frontier, tasks=tasks)


def _recorded(out: Path) -> list[Family]:
    """Return the records in a directory, which need not have any model."""
    with loading_torch("reading records"):
        from export.papers.frontier.records import is_measured, read_family

        found = []
        for directory in sorted(path for path in out.glob("*-seed*") if path.is_dir()):
            if is_measured(directory):
                found.append(read_family(directory))
            else:
                remark(f"{directory.name}: left out, because it is not measured yet")
        if not found:
            fix = "Give the --out of an earlier `fewheads frontier`, or leave --report out."
            raise UsageError(f"--out {out}", given=Raw("no family"), expected="records of one at least", fix=fix)
        return found


def _summed_up(families: list[Family]) -> Frontier:
    from export.papers.frontier.summary import frontier_of

    ordered = sorted(families, key=lambda one: AVERAGED.index(one.answered.settings.task))
    return frontier_of(ordered, _joined([one.answered.settings for one in ordered]))


def _write(found: Frontier, out: Path, *, plots: bool) -> None:
    from export.papers.frontier.plot import draw
    from export.papers.frontier.report import report_of

    write_whole(out / "frontier.json", msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    write_whole(out / "report.md", report_of(found).encode())
    if plots:
        draw(found, out / "frontier.png")


def _print(found: Frontier) -> None:
    from export.papers.frontier.report import NO_CLAIM

    speeds = ("speed-up", "at 128 tokens", "over dense INT8")
    columns = ("run", "precision", *speeds, "average", "points, all tasks", "points", "95 % interval")
    rows = [
        (
            point.run,
            point.precision,
            point.speedup,
            point.fixed_speedup,
            point.int8_speedup,
            found.average_of(point),
            None if found.average_of(point) is None else f"{point.difference.value:+.2f}",
            *(_words(point.judged) if found.is_judged(one.task for one in point.tasks) else (None, None)),
        )
        for point in found.points
    ]
    seeds = ", ".join(f"{task} {number}" for task, number in found.seeds.items())
    title = f"Points against dense FP32 on {', '.join(found.judged)}; ONNX Runtime, one thread, batch 1; seeds: {seeds}"
    print_table(f"{title}; processor: {', '.join(found.processors)}", columns, rows)
    heads = ("control", "speed of the search", "of the control", "points ahead", "95 % interval")
    for when, advantages in {"": found.advantages, " before distillation": found.undistilled_advantages}.items():
        ahead = [(one.control, one.speedup, one.control_speedup, *_words(one.difference)) for one in advantages]
        print_table(f"The search against simple reductions{when}", heads, ahead)
    static = [(one.run, *_words(one.difference)) for one in found.static]
    print_table("Static INT8, for TensorRT, against the same run in FP32", ("run", "points", "95 % interval"), static)
    if not found.above_chance:
        remark(NO_CLAIM)


def _words(difference: Difference) -> tuple[str, str]:
    low, high = difference.interval
    return f"{difference.value:+.2f}", f"{low:+.2f} … {high:+.2f}"
