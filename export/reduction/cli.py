"""The command ``fewheads reduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table, progress, remark
from export.figures import check_plot
from export.loading import loading_torch
from export.options import replace_option, run_data_dir_option
from export.outputs import check_file, check_run
from export.runs import data_dir_of, recorded
from export.tasks import data_of

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.reduction.reduce import Progress
    from export.reduction.run import Reduced


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--target-speedup",
    type=click.FloatRange(1, min_open=True),
    default=2.0,
    show_default=True,
    help="For the whole model, at --tokens, on ONNX Runtime with one thread.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 512),
    default=32,
    show_default=True,
    help="Length of the input that is timed; images have a fixed one.",
)
@click.option(
    "--calibration",
    "examples",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Examples to measure with; their tokens must outnumber the features of the widest layer.",
)
@run_data_dir_option
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The new run directory. Timings and unfinished layers are kept beside it, in .RUN.reduction, and reused.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw the size and the error of each layer, as .png, .svg or .pdf; needs matplotlib.",
)
@replace_option("an earlier run at --out, and a file at --plot")
@json_option
def reduce(
    run: Path,
    target_speedup: float,
    tokens: int,
    examples: int,
    data_dir: Path | None,
    out: Path,
    plot: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Make a fine-tuned model smaller, until it is so many times faster.

    Heads, their width and hidden units go where the answers change least. Nothing is trained: to win back accuracy,
    fine-tune the new run with the old one as --teacher. An interrupted reduction resumes when the same command is given
    again.
    """
    config = recorded(run)
    data_dir = data_dir_of(config, data_dir)
    inputs = {"RUN": run, "the data in": data_of(config, data_dir)}
    check_run("--out", out, inputs, replace=replace)
    if plot:
        check_file("--plot", plot, {**inputs, "--out": out}, replace=replace)
        check_plot(plot)
    with loading_torch():
        from export.reduction.run import reduce_run, state_of
    if state_of(run, out).exists():
        remark(f"{out.name}: resumes from the timings and layers in {state_of(run, out)}")
    with progress() as bar:
        names = {"losses": "trying each option", "layers": "reducing layers"}
        tasks = {"times": bar.add_task("timing each option", total=None, note="")}
        tasks |= {stage: bar.add_task(name, total=None, note="") for stage, name in names.items()}

        def on_shape(done: int, shapes: int) -> None:
            bar.update(tasks["times"], completed=done, total=shapes)

        def on_progress(step: Progress) -> None:
            bar.update(tasks[step.stage], completed=step.done, total=step.layers)

        reduced = reduce_run(
            run,
            data_dir,
            out,
            target_speedup,
            tokens=tokens,
            examples=examples,
            on_shape=on_shape,
            on_progress=on_progress,
        )
    if as_json:
        print_json(reduced)
    else:
        _print(reduced)
    if plot:  # last, so that nothing is lost where it cannot be drawn
        from export.reduction.plot import draw

        draw(reduced, plot)


def _print(reduced: Reduced) -> None:
    columns = ("layer", "heads", "width", "units", "logits' error", "attention's error", "feed-forward's error")
    rows = [
        (
            number,
            layer.plan.shape.num_heads,
            layer.plan.shape.head_dim,
            layer.plan.shape.ffn_dim,
            layer.logits_error,
            layer.measured_attention_error,
            layer.measured_feed_forward_error,
        )
        for number, layer in enumerate(reduced.layers)
    ]
    measured = reduced.measured
    title = (
        f"{measured.ratio:.2f} times faster at {reduced.tokens} tokens ({measured.dense_milliseconds:.2f} ms to "
        f"{measured.milliseconds:.2f} ms), {reduced.expected_speedup:.2f} expected, {reduced.bound:.2f} at most; "
        f"in {reduced.directory}"
    )
    print_table(title, columns, rows)
    accuracy = [(m.split, m.metric, m.value, m.n) for m in reduced.metrics.measures]
    print_table("Before any fine-tuning", ("split", "metric", "value", "items"), accuracy)
