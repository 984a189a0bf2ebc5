"""The command ``fewheads reduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.bench.layer_latencies import LayerLatencies
from edge.cli.output import json_option, print_json, print_table, remark
from edge.errors import Raw, UsageError
from export.bundle.outputs import check_run
from export.finetune import data_inputs, is_imported, needed_data
from export.finetune.options import check_final
from export.finetune.recipe import restoring_command
from export.papers.looped import MODEL as LOOPED
from export.papers.looped.options import SizeOptions, check_others, print_reduced, shrink_run, size_options
from export.reduce.options import PlanOptions, plan_options, point_rows, reduction_progress
from export.reduce.target import LATENCIES, OFFERED, Strategy, Target, parse_target
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, device_option, final_option, out_option, replace_option
from export.training.points import THIS, points_of
from export.training.runs import recorded

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.reduce.run import PlannedRun
    from export.training.device import DeviceName

#: Options that looped runs do not have.
_SEARCH = (
    *("target_speedup", "name", "table", "tokens", "batches", "precision"),
    *("examples", "data_dir", "data", "strategy", "final"),
)

#: A measured speed-up below this share of the planned one is remarked on.
_SLOWER = 0.85


@click.command()
@click.argument("run", type=DIRECTORY)
@click.option(
    "--for",
    "name",
    help="Plan for a Jetson, such as orin-nano-super:15W, by prediction; `this` machine is measured.  [default: this]",
)
@plan_options
@out_option("The new run directory. Timings and unfinished layers are kept beside it, in .RUN.reduction, and reused.")
@click.option(
    "--latency-table",
    "table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plan for another device by its table, from `fewheads profile`.",
)
@click.option(
    "--strategy",
    type=click.Choice(OFFERED),
    default=OFFERED[0],
    show_default=True,
    help="'search' finds the best shape of each layer, and 'uniform' one for all. After distillation they are equally "
    "accurate; without it, 'search' is better.",
)
@size_options
@device_option
@final_option
@replace_option("an earlier run at --out")
@json_option
def reduce(
    run: Path,
    name: str | None,
    options: PlanOptions,
    out: Path,
    table: Path | None,
    strategy: Strategy,
    sizes: SizeOptions,
    device: DeviceName,
    final: bool,
    replace: bool,
    as_json: bool,
) -> None:
    """Make a trained model smaller.

    Removes heads, their width, hidden units and whole layers where the outputs change least. A fine-tuned model shrinks
    until it reaches a speed-up, and is not trained: to win back accuracy, fine-tune the new run with the old one as
    --teacher. A looped model shrinks to --heads, --head-dim and --units, and is trained for --steps. The same command
    resumes an interrupted reduction.
    """
    config = recorded(run)
    if config is not None and config.model == LOOPED:
        check_others(_SEARCH)
        check_run("--out", out, {"RUN": run}, replace=replace)
        looped = shrink_run(run, out, sizes, device)
        if as_json:
            print_json(looped)
        else:
            print_reduced(looped)
        return
    sizes.check_none()
    check_final(final, is_imported(config))
    target = _target(name, table)
    points, precision = points_of(options.tokens, options.batches), options.checked_precision([target])
    data_dir = needed_data(config, options.data_dir, options.data)
    inputs = {"RUN": run, **data_inputs(config, data_dir), "--latency-table": table}
    check_run("--out", out, inputs, replace=replace)
    with loading_torch():
        from export.reduce.run import reduce_run, state_of
    if state_of(run, out).exists():
        remark(f"{out.name}: resumes from the timings and layers in {state_of(run, out)}")
    with reduction_progress() as on_progress:
        reduced = reduce_run(
            run,
            data_dir,
            out,
            options.target_speedup,
            points=points,
            examples=options.examples,
            target=target,
            precision=precision,
            strategy=strategy,
            final=final,
            on_progress=on_progress,
        )
    if target == THIS and reduced.measured_speedup < _SLOWER * reduced.expected_speedup:
        remark(
            f"{out.name}: {reduced.measured_speedup:.2f} times faster, where the timed shapes promised "
            f"{reduced.expected_speedup:.2f}. If other work disturbed their timing, delete "
            f"{state_of(run, out) / LATENCIES} and repeat the command with --replace on an idle machine."
        )
    if as_json:
        print_json(reduced)
    else:
        assert config is not None  # reduced from a run
        _print(reduced, restoring_command(config, data_dir, model=out, teacher=run))


def _target(name: str | None, table: Path | None) -> Target:
    """Return what to plan for; raise a UsageError if both options name it."""
    if name is None:
        return table or THIS
    if table:
        fix = "Leave --latency-table out for a prediction, or --for to plan with the table."
        given = Raw(f"--for {name} and --latency-table {table}")
        raise UsageError("the device to plan for", given=given, expected="one of them", fix=fix)
    return parse_target(name)


def _print(reduced: PlannedRun, restoring: str) -> None:
    columns = ("layer", "heads", "width", "units", "logits' error", "attention's error", "feed-forward's error")
    rows = [
        (
            layer.number,
            layer.plan.shape.num_heads,
            layer.plan.shape.head_dim,
            layer.plan.shape.ffn_dim,
            layer.logits_error,
            layer.measured_attention_error,
            layer.measured_feed_forward_error,
        )
        for layer in reduced.layers
    ]
    planned, where = reduced.planned, LayerLatencies(key=reduced.latency_key).name
    left_out = sorted(set(range(planned.original_layers)) - set(planned.kept))
    removed = f", without layers {', '.join(map(str, left_out))}" if left_out else ""
    print_table(f"Reduced to {reduced.directory}{removed}", columns, rows)
    title = (
        f"{reduced.expected_speedup:.2f} times faster expected on {where} ({planned.label}), "
        f"{reduced.measured_speedup:.2f} measured on this processor"
    )
    print_table(title, *point_rows(planned.points))
    accuracy = [(m.split, m.metric, m.value, m.n) for m in reduced.metrics.measures]
    print_table("Before any fine-tuning", ("split", "metric", "value", "items"), accuracy)
    divergence = reduced.divergence
    click.echo(
        f"Divergence from the original: {divergence.calibration:.3g} on the calibration set, "
        f"{divergence.holdout:.3g} on the hold-out; if the second is much larger, give more --calibration."
    )
    click.echo(f"Next, restore its accuracy:\n{restoring}")
