"""The command ``fewheads reduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table, progress
from export.options import data_dir_option

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
    help="Of the whole model, at --tokens, on ONNX Runtime with one thread.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 512),
    default=32,
    show_default=True,
    help="In the input to be timed; images have their own.",
)
@click.option(
    "--calibration",
    "examples",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Examples to measure with.",
)
@data_dir_option
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The new run directory; an earlier run there is replaced, an unfinished one continued.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw what stays of each layer, and what it costs, .png, .svg or .pdf.",
)
@json_option
def reduce(
    run: Path,
    target_speedup: float,
    tokens: int,
    examples: int,
    data_dir: Path,
    out: Path,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Make a fine-tuned model smaller, until it is so many times faster.

    Heads, their width and hidden units go where the answers change least. Nothing is trained: to win back what was
    lost, fine-tune the new run with the old one as --teacher. An interrupted reduction goes on when the same command is
    given again.
    """
    with progress() as bar:
        loading = bar.add_task("loading torch", total=1, note="")
        import torch

        from export.reduction.run import reduce_run

        bar.advance(loading)
        # One thread gives the same sums on every machine.
        torch.set_num_threads(1)
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
