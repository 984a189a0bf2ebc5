"""The command ``fewheads compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table, remark
from edge.errors import UsageError
from export.bundle.outputs import check_workspace
from export.commands.finetune_options import epochs_option, rate_option
from export.figures import new_figure
from export.finetune import data_inputs, labelled_data
from export.finetune.recipe import Recipe
from export.loading import loading_torch
from export.options import (
    DIRECTORY,
    device_option,
    jobs_option,
    out_option,
    plots_option,
    precision_option,
    ray_option,
    run_data_dir_option,
)
from export.training.jobs import run_jobs, use_gpus
from export.training.provenance import described
from export.training.runs import recorded
from export.training.watch import watching

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.papers.adaptive.compare import Result
    from export.papers.adaptive.mechanisms import Mechanism
    from export.papers.adaptive.summary import Row
    from export.training.device import DeviceName
    from export.training.recipe import Precision

_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


@click.command()
@click.argument("run", type=DIRECTORY)
@run_data_dir_option
@click.option("--only", "names", multiple=True, help="Compare only this mechanism with 'full'; repeatable.")
@click.option("--ablations", is_flag=True, help="Also compare widths of the scorer and weights of the loss.")
@click.option("--limit", type=click.IntRange(1), help="Train each on at most so many examples; all by default.")
@epochs_option(1)  # RUN is fine-tuned already
@rate_option
@device_option
@precision_option()
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs of each, seeds from 0 on.")
@click.option("--distil", is_flag=True, help="Train all of them with RUN as the teacher.")
@click.option(
    "--share",
    type=click.FloatRange(0.1, 0.9),
    default=0.5,
    show_default=True,
    help="Share of attention to keep, for mechanisms that have a choice.",
)
@click.option(
    "--target-speedup",
    type=click.FloatRange(1, min_open=True),
    default=1.76,
    show_default=True,
    help="For the reduction with feed-forward layers; the default is the paper's claim.",
)
@click.option("--tokens", type=click.IntRange(1, 512), help="Length of the timed input; the median of dev by default.")
@click.option("--calls", type=click.IntRange(1), default=60, show_default=True, help="Calls of each model in a timing.")
@click.option("--lengths/--no-lengths", default=True, show_default=True, help="Time shapes from 16 to 2048 tokens.")
@plots_option
@click.option(
    "--beside",
    multiple=True,
    type=DIRECTORY,
    help="Another finished comparison, whose heads are drawn below; repeatable.",
)
@jobs_option
@ray_option
@out_option("Directory for all results; a comparison with the same options resumes there.")
@json_option
def compare(
    run: Path,
    data_dir: Path | None,
    names: tuple[str, ...],
    ablations: bool,
    limit: int | None,
    epochs: int,
    lr: float,
    device: DeviceName,
    precision: Precision,
    seeds: int,
    distil: bool,
    share: float,
    target_speedup: float,
    tokens: int | None,
    calls: int,
    lengths: bool,
    plots: bool,
    beside: tuple[Path, ...],
    jobs: int | None,
    ray: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Compare ways to save attention, as paper 002 does, from a fine-tuned RUN.

    Each gets the same training. Accuracy is measured on hold-out and dev, and speed on ONNX Runtime, in turns with the
    dense model: with smaller matrices if possible, else with all scorers and masks. Writes results.json and figures.
    """
    config = recorded(run)
    data_dir = labelled_data(config, data_dir)
    apart = {"RUN": run, **data_inputs(config, data_dir), **{f"--beside {one}": one for one in beside}}
    check_workspace("--out", out, apart, settings="settings.json")
    if plots:
        new_figure(1, 1, without="give --no-plots")
    with loading_torch("loading torch and data"):
        from export.papers.adaptive import compare as comparison
        from export.papers.adaptive.inputs import read_inputs, settings_of
        from export.papers.adaptive.mechanisms import ABLATIONS, MECHANISMS

        mechanisms = _chosen(names, MECHANISMS | ABLATIONS, list(MECHANISMS) + list(ABLATIONS) * ablations)
        recipe = Recipe(epochs=epochs, peak_learning_rate=lr, precision=precision)
        others = [comparison.read_result(directory) for directory in beside]
        inputs = read_inputs(run, data_dir, limit)
        settings = settings_of(
            inputs,
            run,
            recipe=recipe,
            limit=limit,
            seeds=tuple(range(seeds)),
            distil=distil,
            share=share,
            target_speedup=target_speedup,
            tokens=tokens,
            calls=calls,
        )
    gpu = use_gpus(device, ray)
    if any(out.glob("seed*")):
        remark(f"resumes the comparison in {out}")
    # Jobs may run on other machines, or in another directory there.
    run, data_dir, out = (path.resolve() for path in (run, data_dir, out))
    with watching("timing layers") as watch:
        trainings = comparison.unfinished_jobs(
            inputs,
            settings,
            mechanisms,
            run=run,
            data_dir=data_dir,
            directory=out,
            device="cuda" if gpu else "cpu",
            on_part=watch.on_part,
        )
    run_jobs(trainings, logs=out / "logs", workers=jobs, ray=ray, gpu=gpu)
    with watching("timing models") as watch:
        result = comparison.time_and_sum_up(
            inputs, settings, mechanisms, out, lengths=_LENGTHS if lengths else (), on_part=watch.on_part
        )
    if as_json:
        print_json(result)
    else:
        _print(result)
    if plots:  # last, so that a failure loses no results
        from export.papers.adaptive.plot import draw

        for path in draw(result, out, others):
            remark(f"drawn: {path}")


def _chosen(names: Sequence[str], known: dict[str, Mechanism], default: Sequence[str]) -> list[Mechanism]:
    for name in names:
        if name not in known:
            expected = f"one of {', '.join(known)}"
            raise UsageError("--only", given=name, expected=expected, fix="Give a mechanism, or leave --only out.")
    return [known[name] for name in known if name in (names or default) or name == "full"]


def _print(result: Result) -> None:
    settings = result.settings
    splits = list(result.rows[0].values)
    columns = ("mechanism", "what", "attention left", "score", *(f"{split}: {result.metric}" for split in splits))
    columns += (f"over full on {splits[-1]}", f"speed at {settings.tokens}", f"at {settings.long}", "at most", "timed")
    rows = [_cells(row, splits, settings.tokens, settings.long) for row in result.rows]
    title = f"{settings.task}: {settings.recipe.epochs} epochs each, seeds {', '.join(map(str, settings.seeds))}; "
    title += f"processor: {', '.join(described(record.processor for record in result.records))}"
    print_table(title, columns, rows)
    if result.lengths:
        lengths = [(one.tokens, one.variant, one.ratio, one.bound) for one in result.lengths]
        print_table("Speed by length, two layers", ("tokens", "variant", "times as fast", "at most"), lengths)


def _cells(row: Row, splits: Sequence[str], tokens: int, long: int) -> tuple[object, ...]:
    from export.training.intervals import points

    bound = row.bounds.get(tokens)
    return (
        row.name,
        row.what,
        round(row.kept, 3),
        "" if row.score is None else f"{row.score:.2f}",
        *(round(100 * row.values[split], 2) for split in splits),
        points(row.differences[splits[-1]]),
        round(row.speeds[tokens], 2),
        round(row.speeds.get(long, row.speeds[tokens]), 2),
        "" if bound is None else f"{bound:.2f}" + ("" if row.explained else " (exceeded)"),
        "smaller" if row.smaller else "as it runs",
    )
