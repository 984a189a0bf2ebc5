"""The command ``fewheads reduce``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.bench.layer_latencies import LayerLatencies
from edge.cli.output import json_option, print_json, print_table, remark
from edge.errors import Raw, UsageError
from export.bundle.outputs import check_run
from export.data.examples import TRAIN
from export.finetune import data_inputs, is_imported, needed_data
from export.finetune.options import check_final
from export.finetune.recipe import restoring_command
from export.reduce.options import (
    DistilOptions,
    PlanOptions,
    distil_options,
    plan_options,
    point_rows,
    reduction_progress,
)
from export.reduce.target import LATENCIES, Target, parse_target
from export.training.loading import all_cores, loading_torch
from export.training.log import RunFiles
from export.training.options import (
    DIRECTORY,
    device_option,
    final_option,
    out_option,
    replace_option,
    usable_precision,
)
from export.training.points import THIS, points_of
from export.training.runs import is_run, recorded

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.reduce.run import PlannedRun
    from export.training.device import DeviceName

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
@distil_options
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
    distilling: DistilOptions,
    device: DeviceName,
    final: bool,
    replace: bool,
    as_json: bool,
) -> None:
    """Make a trained model smaller.

    Removes layers, heads, their width and hidden units where the outputs change least. A fine-tuned or imported model
    shrinks until it reaches a speed-up. With --distil it is trained to answer as before; without, fine-tune the new run
    with the old one as --teacher. Several speed-ups, such as --target-speedup 1.5,2,3, share that training, and become
    the runs OUT/1.5x, OUT/2x and OUT/3x. The same command resumes an interrupted reduction.
    """
    config = recorded(run)
    imported = is_imported(config)
    check_final(final, imported)
    target = _target(name, table)
    points, precision = points_of(options.tokens, options.batches), options.checked_precision([target])
    distil = distilling.checked_texts()
    calibrates = bool(distil) and imported and not (options.data or (config and config.data_dir))
    if calibrates:
        options = options._replace(data=distil[0])
    data_dir = needed_data(config, options.data_dir, options.data)
    texts = {f"--distil {path}": path for path in distil}
    inputs = {"RUN": run, **data_inputs(config, data_dir), "--latency-table": table, **texts}
    outs = _outs(out, options.target_speedups)
    files = RunFiles(out)  # with a state, an interruption left some runs of the family written, and others not
    for directory in outs.values():
        check_run("--out", directory, inputs, replace=replace or files.state.exists())
    with loading_torch():
        from export.data.evaluation import has_evaluation
        from export.reduce.restore import RestorationRecipe
        from export.reduce.run import Restoration, reduce_runs, state_of
    if state_of(run, out).exists():
        remark(f"{out.name}: resumes from the timings and layers in {state_of(run, out)}")
    evaluated = (options.data_dir or Path("data")) if imported else data_dir
    compares = (distilling.leave_out and imported) or has_evaluation(evaluated)
    if distil and not compares:
        remark(f"--distil: no text is compared with evaluation sets, of which there are none in {evaluated}")
    bars = reduction_progress(f"restoring {out.name}" if distil else None)
    with all_cores(bool(distil)), bars as (on_progress, watch):
        restoration = None
        if distil:
            trained_in = usable_precision(click.get_current_context(), None, "auto")
            rate, passes = distilling.rate, distilling.passes
            recipe = RestorationRecipe(passes=passes, peak_learning_rate=rate, precision=trained_in)
            sets, leave_out = evaluated if compares else None, distilling.leave_out
            restoration = Restoration(distil, recipe, files, sets, leave_out, calibrates, device, watch)
        reduced = reduce_runs(
            run,
            data_dir,
            outs,
            points=points,
            examples=options.examples,
            target=target,
            precision=precision,
            strategy=options.strategy or ("spread" if distil else "search"),
            restoration=restoration,
            final=final,
            on_progress=on_progress,
        )
    if target == THIS:
        _remark_slower(reduced, state_of(run, out) / LATENCIES)
    if reduced[0].losses_on == TRAIN and not imported:
        remark(f"{out.name}: the hold-out is too small for the losses, which were measured on learnt examples instead")
    if as_json:
        print_json(reduced[0] if len(reduced) == 1 else reduced)
        return
    assert config is not None  # reduced from a run
    for each in reduced:
        _print(each)
        if not distil:
            restoring = restoring_command(config, data_dir, model=Path(each.directory), teacher=run)
            click.echo(f"Next, restore its accuracy:\n{restoring}")


def _target(name: str | None, table: Path | None) -> Target:
    """Return what to plan for; raise a UsageError if both options name it."""
    if name is None:
        return table or THIS
    if table:
        fix = "Leave --latency-table out for a prediction, or --for to plan with the table."
        given = Raw(f"--for {name} and --latency-table {table}")
        raise UsageError("the device to plan for", given=given, expected="one of them", fix=fix)
    return parse_target(name)


def _outs(out: Path, speedups: Sequence[float]) -> dict[float, Path]:
    """Return the directories of the runs by their speed-ups; a UsageError refuses a run where a family is to be."""
    if len(speedups) == 1:
        return {speedups[0]: out}
    outs = {speedup: out / f"{speedup:g}x" for speedup in speedups}
    if is_run(out):
        expected = f"a directory for the runs {' and '.join(directory.name for directory in outs.values())}"
        raise UsageError(f"--out {out}", given=Raw("an existing run"), expected=expected, fix="Give another --out.")
    return outs


def _remark_slower(reduced: Sequence[PlannedRun], latencies: Path) -> None:
    for each in reduced:
        if each.measured_speedup < _SLOWER * each.expected_speedup:
            name = Path(each.directory).name
            remark(
                f"{name}: {each.measured_speedup:.2f} times faster, where the timed shapes promised "
                f"{each.expected_speedup:.2f}. If other work disturbed their timing, delete {latencies} and repeat the "
                "command with --replace on an idle machine."
            )


def _print(reduced: PlannedRun) -> None:
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
    restored = reduced.closeness is not None
    print_table(
        "After restoration" if restored else "Before any fine-tuning", ("split", "metric", "value", "items"), accuracy
    )
    divergence = reduced.divergence
    if reduced.closeness is not None:
        click.echo(f"Closeness to the original on held-out texts of --distil: {reduced.closeness:.4g}")
    click.echo(
        f"Divergence from the original: {divergence.calibration:.3g} on the calibration set, "
        f"{divergence.holdout:.3g} on the hold-out"
        + ("." if restored else "; if the second is much larger, give more --calibration.")
    )
