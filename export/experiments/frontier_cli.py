"""The command ``fewheads frontier``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec.structs import replace

from edge.cli.output import json_option, print_json, print_table, progress
from edge.files import write_whole
from export.options import data_dir_option, precision_option
from export.tasks import AVERAGED
from export.tasks.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.experiments.family import Budget, Settings
    from export.experiments.frontier import Frontier
    from export.experiments.measure import MeasuredFamily
    from export.tasks.metrics import Difference
    from export.tasks.recipe import Precision


@click.command()
@click.option(
    "--model",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="What all runs start from: a Hugging Face directory.",
)
@click.option(
    "--task", "tasks", multiple=True, type=click.Choice(AVERAGED), help="One of the five; all of them if not given."
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Families of each task.")
@click.option("--epochs", type=click.IntRange(1), help="Of each training; as the task's budget has it if not given.")
@click.option("--limit", type=click.IntRange(1), help="Train on so many examples only.")
@precision_option(default="bf16")
@data_dir_option
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything goes; what is finished there stays, what is not is continued.",
)
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

    Each family is trained, reduced, distilled, exported in FP32 and INT8, and asked in turns on ONNX Runtime. Writes
    frontier.json and frontier.png after every family; one of them takes 20 to 40 minutes of a core.
    """
    with progress() as bar:
        loading = bar.add_task("loading torch", total=1, note="")
        import torch

        from export.experiments.family import BUDGETS, Settings, family_directory
        from export.experiments.frontier import frontier_of
        from export.experiments.frontier_plot import WITHOUT, draw
        from export.experiments.measure import read_measured
        from export.figures import new_figure

        if plots:
            new_figure(1, 1, without=WITHOUT)  # now, not after an hour of training
        bar.advance(loading)
    # One thread gives the same sums on every machine.
    torch.set_num_threads(1)
    settings = Settings(precision=precision)
    given = {"limit": limit, "epochs": epochs, "teacher_epochs": epochs}
    families: list[MeasuredFamily] = []
    wanted = [(task, seed) for seed in range(seeds) for task in tasks or AVERAGED]
    for place, (task, seed) in enumerate(wanted, start=1):
        measured = read_measured(family_directory(out, task, seed))
        if measured is None:
            budget = replace(BUDGETS[task], **{name: value for name, value in given.items() if value})
            families.append(_family(task, model, data_dir, out, seed, budget, settings))
        else:
            families.append(measured)
        if measured is None or place == len(wanted):  # what was there before is summed up once
            found = frontier_of(families, out)
            write_whole(out / "frontier.json", msgspec.json.format(msgspec.json.encode(found), indent=1))
            if plots:
                draw(found, out / "frontier.png")
    if as_json:
        print_json(found)
        return
    _print(found)


def _family(
    name: str, model: Path, data_dir: Path, out: Path, seed: int, budget: Budget, settings: Settings
) -> MeasuredFamily:
    """Make what is missing of a family, and measure it."""
    from export.experiments.family import family_directory, gather, stages
    from export.experiments.measure import measure_family
    from export.tasks.glue import TASKS
    from export.tasks.tokens import Encoded

    task, directory = TASKS[name], family_directory(out, name, seed)
    material = gather(task, model, data_dir, budget=budget, settings=settings)
    for stage in stages(material, directory, seed=seed, budget=budget, settings=settings):
        with watching(f"{directory.name}/{stage.name}") as watch:
            stage.make(watch)
    dev = material.data.dev["dev"]
    assert isinstance(dev, Encoded)
    with watching(f"{directory.name}/measured") as watch:
        return measure_family(task, directory, dev, seed=seed, on_item=partial(watch.on_part, "items"))


def _print(found: Frontier) -> None:
    columns = (
        "tier",
        "precision",
        "speed-up",
        "at 128 tokens",
        "over dense INT8",
        "average",
        "points",
        "95 % interval",
    )
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
    print_table(f"Against dense FP32, ONNX Runtime, one thread, batch 1; seeds: {seeds}", columns, rows)
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
