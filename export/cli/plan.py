"""The command ``fewheads plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.bench.layer_latencies import PREDICTION
from edge.cli.output import json_option, print_json, print_table
from edge.errors import Raw, UsageError
from export.finetune import needed_data
from export.reduce.options import PlanOptions, plan_options, point_rows, reduction_progress
from export.reduce.target import parse_target
from export.training.loading import loading_torch
from export.training.options import DIRECTORY
from export.training.points import THIS, points_of
from export.training.runs import recorded

if TYPE_CHECKING:
    from export.models.transformer import LayerShape
    from export.reduce.comparison import PlanComparison


@click.command()
@click.argument("run", type=DIRECTORY)
@click.option(
    "--for",
    "names",
    multiple=True,
    help="A Jetson, such as orin-nano-super:15W, by prediction, or `this` machine, repeatable.  [default: this]",
)
@click.option(
    "--latency-table",
    "tables",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Table of `fewheads profile` on another device, repeatable.",
)
@plan_options
@json_option
def plan(run: Path, names: tuple[str, ...], tables: tuple[Path, ...], options: PlanOptions, as_json: bool) -> None:
    """Compare the plans of `fewheads reduce` for several devices.

    It does not reduce the model. Timings and losses are kept beside RUN, in .RUN.reduction, where `fewheads reduce`
    finds them. With --strategy spread it needs no data.
    """
    targets = [*dict.fromkeys(map(parse_target, names or [THIS])), *tables]
    points, precision = points_of(options.tokens, options.batches), options.checked_precision(targets)
    if len(options.target_speedups) > 1:
        given = Raw(",".join(f"{speedup:g}" for speedup in options.target_speedups))
        raise UsageError("--target-speedup", given=given, expected="one", fix="Give one; `reduce` takes several.")
    (target_speedup,) = options.target_speedups
    data_dir = None
    if options.strategy != "spread":
        data_dir = needed_data(recorded(run), options.data_dir, options.data)
    with loading_torch():
        from export.reduce.comparison import compare_plans
    with reduction_progress() as (on_progress, _):
        compared = compare_plans(
            run,
            data_dir,
            target_speedup,
            targets,
            points=points,
            examples=options.examples,
            precision=precision,
            on_progress=on_progress,
        )
    if as_json:
        print_json(compared)
    else:
        _print(compared)


def _print(compared: PlanComparison) -> None:
    numbers = range(1, len(compared.plans) + 1)
    names = [(n, plan.device, plan.label) for n, plan in zip(numbers, compared.plans, strict=True)]
    print_table("Devices", ("plan", "device", "times"), names)
    shapes = [
        (layer, *(_words(plan.layers[layer]) for plan in compared.plans))
        for layer in range(len(compared.plans[0].layers))
    ]
    sizes = " and ".join(point.name for point in compared.plans[0].points)
    title = f"Heads x width, hidden units, for {compared.target_speedup:g} times at {sizes}"
    print_table(title, ("layer", *(f"plan {n}" for n in numbers)), shapes)
    rows = [
        (n, *(round(speedup, 2) for speedup in plan.speedups), "none" if plan.loss is None else plan.loss)
        for n, plan in zip(numbers, compared.plans, strict=True)
    ]
    sources = ("predicted" if plan.label == PREDICTION else plan.label for plan in compared.plans)
    devices = (f"on device {n}, {source}" for n, source in zip(numbers, sources, strict=True))
    print_table("Speed of each plan", ("plan", *devices, "loss"), rows)
    for n, plan in zip(numbers, compared.plans, strict=True):
        print_table(f"Plan {n} on {plan.device}: {plan.label}", *point_rows(plan.points))


def _words(shape: LayerShape | None) -> str:
    return f"{shape.num_heads} x {shape.head_dim}, {shape.ffn_dim}" if shape else "left out"
