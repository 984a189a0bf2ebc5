"""The command ``fewheads frontier``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, remark, working
from edge.files import write_whole
from export.figures import new_figure
from export.loading import loading_torch
from export.options import DIRECTORY, data_dir_option, out_option, precision_option
from export.outputs import check_workspace
from export.tasks import AVERAGED, data_directory
from export.training.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.experiments.family import FamilySettings
    from export.experiments.frontier import Frontier
    from export.experiments.measure import MeasuredFamily
    from export.intervals import Difference
    from export.training.recipe import Precision


@click.command()
@click.option("--model", required=True, type=DIRECTORY, help="Hugging Face directory that all runs start from.")
@click.option(
    "--task", "tasks", multiple=True, type=click.Choice(AVERAGED), help="A task, repeatable; all five by default."
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Families of each task.")
@click.option("--epochs", type=click.IntRange(1), help="Length of each training; 1 to 6 by default, as the task needs.")
@click.option(
    "--limit", type=click.IntRange(1), help="Train on at most so many examples; by default all, but 24,000 of SST-2."
)
@precision_option()
@data_dir_option
@out_option("Directory for all results; families with the same settings resume there, others are refused.")
@click.option("--plots/--no-plots", default=True, show_default=True, help="Draw frontier.png; needs matplotlib.")
@json_option
def frontier(
    model: Path,
    tasks: tuple[str, ...],
    seeds: int,
    epochs: int | None,
    limit: int | None,
    precision: Precision,
    data_dir: Path,
    out: Path,
    plots: bool,
    as_json: bool,
) -> None:
    """Measure speed against accuracy: dense models and leaner ones, on five tasks of GLUE and several seeds.

    Each family is trained, reduced, distilled, exported in FP32 and INT8, and run in turns on ONNX Runtime. Writes
    frontier.json and frontier.png after every family, which takes 20 to 40 minutes of a core.
    """
    tasks = tasks or AVERAGED
    inputs = {"--model": model, **{f"the data of {task} in": data_directory(task, data_dir) for task in tasks}}
    check_workspace("--out", out, inputs, settings="*-seed*")
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch("loading torch and data"):
        from export.experiments.family import Settings, family_directory, settings_of
        from export.experiments.frontier import draw, frontier_of
        from export.experiments.measure import read_measured
        from export.experiments.settings import check_settings

        given = {"limit": limit, "epochs": epochs, "teacher_epochs": epochs}
        changes = {name: value for name, value in given.items() if value}
        families = settings_of(tasks, range(seeds), model, data_dir, Settings(precision=precision), changes)
        for family in families:  # all of them, before the first is trained
            check_settings(family_directory(out, family.task, family.seed), family)
    measured: list[MeasuredFamily] = []
    for family in families:
        directory = family_directory(out, family.task, family.seed)
        earlier = read_measured(directory)
        if earlier:
            remark(f"{directory.name}: measured earlier")
        measured.append(earlier or _family(family, model, data_dir, directory))
        if earlier is None or family is families[-1]:  # earlier measurements are summed up once
            with working("summing up"):
                found = frontier_of(measured, out)
                write_whole(out / "frontier.json", msgspec.json.format(msgspec.json.encode(found), indent=1))
                if plots:
                    draw(found, out / "frontier.png")
    if as_json:
        print_json(found)
        return
    _print(found)


def _family(family: FamilySettings, model: Path, data_dir: Path, directory: Path) -> MeasuredFamily:
    from export.experiments.family import family_inputs, stages
    from export.experiments.measure import measure_family
    from export.experiments.settings import keep_settings
    from export.tasks.glue import TASKS
    from export.tasks.tokens import Encoded

    if directory.exists():
        remark(f"{directory.name}: resumes")
    keep_settings(directory, family)
    task, budget, settings = TASKS[family.task], family.budget, family.settings
    inputs = family_inputs(task, model, data_dir, budget=budget, settings=settings)
    for stage in stages(inputs, directory, seed=family.seed, budget=budget, settings=settings):
        with watching(f"{directory.name}/{stage.name}") as watch:
            stage.make(watch)
    dev = inputs.data.dev["dev"]
    assert isinstance(dev, Encoded)
    with watching(f"{directory.name}/measured") as watch:
        return measure_family(task, directory, dev, seed=family.seed, on_item=partial(watch.on_part, "items"))


def _print(found: Frontier) -> None:
    speeds = ("speed-up", "at 128 tokens", "over dense INT8")
    columns = ("tier", "precision", *speeds, "average", "points", "95 % interval")
    rows = [
        (
            point.tier,
            point.precision,
            point.speedup,
            point.fixed_speedup,
            point.int8_speedup,
            point.average,
            *_words(point.difference),
        )
        for point in found.points
    ]
    seeds = ", ".join(f"{task} {number}" for task, number in found.seeds.items())
    title = f"Against dense FP32, ONNX Runtime, one thread, batch 1; seeds: {seeds}"
    print_table(f"{title}; processor: {', '.join(found.processors)}", columns, rows)
    each = [
        (task.task, point.tier, point.precision, task.metric, *_words(task.difference))
        for number in range(len(found.seeds))
        for point in found.points
        for task in [point.tasks[number]]
    ]
    print_table("Each task", ("task", "tier", "precision", "metric", "points", "95 % interval"), each)


def _words(difference: Difference) -> tuple[str, str]:
    low, high = difference.interval
    return f"{difference.value:+.2f}", f"{low:+.2f} … {high:+.2f}"
