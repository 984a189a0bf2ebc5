"""The command ``fewheads finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table, progress
from export.options import data_dir_option, precision_option, seeds_option
from export.tasks import NAMES
from export.tasks.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.runs import RunMetrics
    from export.tasks.recipe import Precision


@click.command()
@click.argument("task", type=click.Choice(NAMES, case_sensitive=False))
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="What to start from: a Hugging Face directory, or a run; one on the same task keeps its head. "
    "Without it, images are learnt by a new ViT.",
)
@click.option("--dim", type=click.IntRange(1), show_default="64", help="Of a new ViT: the width of a token.")
@click.option("--depth", type=click.IntRange(1), show_default="4", help="Of a new ViT: layers.")
@click.option("--heads", type=click.IntRange(1), show_default="4", help="Of a new ViT: heads of each layer.")
@data_dir_option
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True, help="The best of them is kept.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=5e-5, show_default=True, help="At its peak.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Examples per step.")
@precision_option(default="fp32")
@click.option("--max-length", type=click.IntRange(8, 512), default=128, show_default=True, help="Tokens per example.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of new head and example order.")
@seeds_option
@click.option("--limit", type=click.IntRange(1), help="Train on so many examples only.")
@click.option(
    "--teacher",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A run on the same task, whose answers and hidden states are imitated.",
)
@click.option(
    "--out",
    default="runs",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the run directories go; an earlier run of the same name is replaced, an unfinished one continued.",
)
@json_option
def finetune(
    task: str,
    model: Path | None,
    dim: int | None,
    depth: int | None,
    heads: int | None,
    data_dir: Path,
    epochs: int,
    lr: float,
    batch: int,
    precision: Precision,
    max_length: int,
    seed: int,
    seeds: int,
    limit: int | None,
    teacher: Path | None,
    out: Path,
    as_json: bool,
) -> None:
    """Fine-tune a model on a task: of GLUE, SQuAD's questions, or images.

    A tenth of the training set is held out and decides which epoch is kept; dev is measured once, at the end. An
    interrupted run goes on when the same command is given again.
    """
    with progress() as bar:
        loading = bar.add_task("loading torch and data", total=1, note="")
        import torch

        from export.seeds import pooled
        from export.tasks.recipe import Recipe
        from export.tasks.registry import TASKS
        from export.tasks.run import finetune_run, prepare

        shape = {"dim": dim, "depth": depth, "heads": heads}
        source = TASKS[task].source(model, {name: value for name, value in shape.items() if value is not None})
        reader = TASKS[task].reader(source)
        data = prepare(TASKS[task], data_dir, reader, max_length=max_length, limit=limit)
        bar.advance(loading)
    # One thread gives the same sums on every machine.
    torch.set_num_threads(1)
    recipe = Recipe(epochs=epochs, batch_size=batch, peak_learning_rate=lr, precision=precision)
    trained = []
    runs = {one: out / (task if seeds == 1 else f"{task}-seed{one}") for one in range(seed, seed + seeds)}
    for one, run in runs.items():
        with watching(run.name) as watch:
            trained.append(
                finetune_run(
                    TASKS[task],
                    source,
                    data,
                    reader,
                    run,
                    recipe,
                    seed=one,
                    max_length=max_length,
                    teacher=teacher,
                    on_step=watch.on_step,
                    on_epoch=watch.on_epoch,
                )
            )
    metrics = pooled(trained)
    if as_json:
        print_json({"task": task, "runs": [str(run) for run in runs.values()], "metrics": metrics})
        return
    _print_measures(task, ", ".join(map(str, runs.values())), metrics)


def _print_measures(task: str, runs: str, metrics: RunMetrics) -> None:
    rows = []
    for measure in metrics.measures:
        low, high = measure.interval or (measure.value, measure.value)
        rows.append((measure.split, measure.metric, measure.value, f"{low:.4f} … {high:.4f}", measure.n))
    title = f"{task}: {metrics.parameters:,} parameters, {metrics.epochs} epochs, {metrics.seconds:.0f} s, in {runs}"
    print_table(title, ("split", "metric", "value", "95 % interval", "items"), rows)
