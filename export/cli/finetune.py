"""The command ``fewheads finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge.cli.output import json_option, print_json, working
from edge.errors import Raw, UsageError
from export.bundle.outputs import check_run
from export.cli.report import write_reports
from export.finetune import DATA, NAMES, data_directory, is_imported
from export.finetune.options import (
    OwnOptions,
    average_option,
    batch_option,
    check_final,
    distillation_of,
    distillation_options,
    epochs_option,
    own_data_options,
    rate_option,
    transfer_option,
)
from export.finetune.recipe import MAX_LENGTH, FinetuningRecipe
from export.report.table import print_measures
from export.training.loading import loading_torch
from export.training.options import (
    DIRECTORY,
    data_dir_option,
    device_option,
    final_option,
    precision_option,
    replace_option,
    runs_option,
    seed_option,
    seeded,
    seeds_option,
    tensorboard_option,
)
from export.training.runs import SPLIT, OwnData, SplitVersion, recorded
from export.training.watch import watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.finetune.task import Task
    from export.training.device import DeviceName
    from export.training.recipe import Precision


class _TaskName(click.Choice[str]):
    """The name of a task; its error lists the files that tasks read."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            directories = "; ".join(f"{files.directory}: {files.names}" for files in DATA.values())
            fix = f"A task reads fixed files below --data-dir ({directories}). For your own, give --data FILE instead."
            raise UsageError("TASK", given=value, expected=f"one of {', '.join(NAMES)}", fix=fix) from None


@click.command()
@click.argument("task", metavar="[TASK]", required=False, type=_TaskName(NAMES, case_sensitive=False))
@own_data_options
@click.option(
    "--model",
    type=DIRECTORY,
    help="Start from a Hugging Face directory or a run; a run on the same task keeps its head. "
    "Tasks of images start from a new ViT without it.",
)
@click.option("--dim", type=click.IntRange(1), show_default="64", help="Width of a token in a new ViT.")
@click.option("--depth", type=click.IntRange(1), show_default="4", help="Layers of a new ViT.")
@click.option("--heads", type=click.IntRange(1), show_default="4", help="Heads in each layer of a new ViT.")
@data_dir_option
@epochs_option()
@rate_option
@batch_option
@average_option
@precision_option()
@device_option
@click.option(
    "--max-length",
    type=click.IntRange(8, 512),
    help=f"Tokens per text.  [default: {MAX_LENGTH}, or those of an imported --teacher]",
)
@seed_option("For new weights and the order of examples.")
@seeds_option
@click.option("--limit", type=click.IntRange(1), help="Train on at most so many examples; all by default.")
@click.option(
    "--teacher",
    type=DIRECTORY,
    help="A run on the same task as the teacher of a distillation; "
    "an imported run teaches those that were reduced from it, with texts or images without labels as --data.",
)
@distillation_options
@transfer_option
@click.option("--name", help="Name of the run's directory.  [default: the name of the task, or of the data]")
@runs_option("the run, which becomes OUT/NAME")
@tensorboard_option
@click.option(
    "--report/--no-report",
    default=True,
    show_default=True,
    help="Also write report.html into the run, as `fewheads report` does; needs matplotlib.",
)
@final_option
@replace_option("an earlier run of that name")
@json_option
def finetune(
    task: str | None,
    own: OwnOptions,
    model: Path | None,
    dim: int | None,
    depth: int | None,
    heads: int | None,
    data_dir: Path,
    epochs: int,
    lr: float,
    batch: int,
    average: float | None,
    precision: Precision,
    device: DeviceName,
    max_length: int | None,
    seed: int,
    seeds: int,
    limit: int | None,
    teacher: Path | None,
    distillation: dict[str, float],
    transfer: Path | None,
    name: str | None,
    out: Path,
    tensorboard: Path | None,
    report: bool,
    final: bool,
    replace: bool,
    as_json: bool,
) -> None:
    """Fine-tune a model on a task, or on your own --data.

    TASK is SST-2, CoLA, STS-B, MRPC, RTE, WNLI, QNLI, MNLI or QQP of GLUE, SQuAD's questions, or images: MNIST, digits
    or ImageNet. A tenth of the training set is held out and decides which epoch is kept; dev is measured with --final
    alone. With an imported run as --teacher, --data are texts or images without labels, and the hold-out measures the
    agreement with it. The same command resumes an interrupted run.
    """
    chosen = _chosen(task, own)
    name = _checked_name(name if name is not None else chosen if isinstance(chosen, str) else chosen.resolve().stem)
    imported = teacher if own.data and teacher and is_imported(recorded(teacher)) else None
    if imported:
        own.check_unlabelled()
    check_final(final, imported is not None)
    how = distillation_of(distillation, teacher)
    if transfer is None and "transfer_share" in distillation:
        fix = "Give --transfer TEXTS, or leave it out."
        raise UsageError("--transfer-share", given=how.transfer_share, expected="--transfer beside it", fix=fix)
    runs = {run_seed: out / run for run_seed, run in seeded(name, seed, seeds).items()}
    directory = data_directory(chosen, data_dir) if isinstance(chosen, str) else chosen
    inputs = {
        "--model": model,
        "--teacher": teacher,
        "--transfer": transfer,
        "the data in": directory,
        "--dev": own.dev,
    }
    for run in runs.values():
        check_run("--out", run, inputs, replace=replace, way_out="another --name or --out")
    with loading_torch():
        from export.finetune.imported import ImportedTask
        from export.finetune.models import open_model
        from export.finetune.run import finetune_run, prepare, split_of, task_of
        from export.training.device import device_of
        from export.training.intervals import pooled
    selected: Task
    if imported:
        selected = task_of(open_model(imported), imported)
    else:
        named = chosen if isinstance(chosen, str) else OwnData(path=str(chosen.resolve())).name
        selected = _with_labels(chosen, own, split_of(named, {"--model": model, "--teacher": teacher}))
    if transfer:
        _check_transfer(selected, teacher)
    read_from = chosen if imported else data_dir
    shape = {name: value for name, value in (("dim", dim), ("depth", depth), ("heads", heads)) if value is not None}
    with working(f"answers of {imported}" if imported else f"reading the data of {selected.name}") as on_rows:
        source = selected.source(model, shape)
        reader = selected.reader(source)
        further: dict[str, Any] = {"transfer": transfer} if transfer else {}
        if isinstance(selected, ImportedTask):
            max_length = max_length or selected.description.max_length
            selected.original.to(device_of(device))
            further = {"precision": precision, "on_rows": on_rows}
            if model and how.hidden:
                further["layers"] = selected.imitated_by(model)
        max_length = max_length or MAX_LENGTH
        data = prepare(selected, read_from, reader, max_length=max_length, limit=limit, **further)
    recipe = FinetuningRecipe(
        epochs=epochs, batch_size=batch, peak_learning_rate=lr, average=average, precision=precision, distillation=how
    )
    trained = []
    for run_seed, run in runs.items():
        with watching(run.name) as watch:
            metrics = finetune_run(
                selected,
                source,
                data,
                reader,
                run,
                recipe,
                seed=run_seed,
                max_length=max_length,
                data_dir=read_from,
                teacher=data.teacher or teacher,
                device=device,
                tensorboard=tensorboard,
                final=final,
                observer=watch,
            )
        trained.append(metrics)
    metrics = pooled(trained)
    if as_json:
        print_json({"task": selected.name, "runs": [str(run) for run in runs.values()], "metrics": metrics})
    else:
        print_measures(selected.name, ", ".join(map(str, runs.values())), metrics)
    if report and data.labels and not imported:  # last, so that a failure loses no results; a span has no report
        write_reports(list(runs.values()), data_dir)


def _chosen(task: str | None, own: OwnOptions) -> str | Path:
    """Return the name of a task, or the path of own data."""
    if own.data is None:
        own.check_none()
        if task is None:
            fix = "Give one of them; 'fewheads finetune --help' has both."
            raise UsageError("TASK", given=Raw("nothing"), expected="a task, or --data with a path", fix=fix)
        return task
    if task is not None:
        raise UsageError("TASK", given=task, expected="nothing beside --data", fix="Leave one of them out.")
    return own.data


def _with_labels(chosen: str | Path, own: OwnOptions, split: SplitVersion | None) -> Task:
    """Return a task on labels, with the hold-out of the runs that the training starts from; None is the present one."""
    from export.finetune.own_texts import own_task
    from export.finetune.run import TASKS
    from export.finetune.text_tasks import SentenceTask

    split = split or SPLIT
    if not isinstance(chosen, str):
        return own_task(own.describe(chosen, split), split)
    task = TASKS[chosen]
    return msgspec.structs.replace(task, split=split) if isinstance(task, SentenceTask) else task


def _check_transfer(task: Task, teacher: Path | None) -> None:
    from export.finetune.text_tasks import SentenceTask

    expected = "a task of texts with labels, and --teacher with a run on it"
    if not isinstance(task, SentenceTask):
        fix = "Leave it out; an imported run as --teacher has its texts as --data."
        raise UsageError("--transfer", given=Raw(task.name), expected=expected, fix=fix)
    if teacher is None:
        raise UsageError(
            "--transfer", given=Raw("no --teacher"), expected=expected, fix="Give --teacher, or leave it out."
        )


def _checked_name(name: str) -> str:
    if not name or Path(name).name != name or name.startswith("."):
        fix = "Give a name here, and its place with --out."
        raise UsageError("--name", given=name, expected="the name of a directory, without / and a leading dot", fix=fix)
    return name
