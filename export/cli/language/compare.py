"""The command ``fewheads language compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.options import FloatRange
from edge.cli.output import json_option
from edge.errors import UsageError
from export.bundle.outputs import check_workspace
from export.cli.language.shared import experiment_seeds_option, resumed_option
from export.papers.experiment import SETTINGS
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, device_option
from export.training.provenance import processor

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.training.device import DeviceName


@click.command()
@click.argument("backbone", type=DIRECTORY)
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIRECTORY/MODULE",
    help="A task: DIRECTORY has train*/MODULE.txt and interpolate/MODULE.txt of the mathematics dataset. Repeatable.",
)
@experiment_seeds_option
@click.option(
    "--methods",
    "groups",
    multiple=True,
    type=click.Choice(["trained", "rules", "few", "forms"]),
    default=("trained",),
    show_default=True,
    help="Heads and other ways to train; rules to choose tokens; the few that --fewer is for, with examples in the "
    "prompt; variations of the head. Repeatable.",
)
@click.option("--limit", type=click.IntRange(1), default=10_000, show_default=True, help="Examples to train on.")
@click.option(
    "--fewer", type=click.IntRange(1), multiple=True, metavar="N", help="Train on N examples, too. Repeatable."
)
@click.option(
    "--lr", type=FloatRange(0, min_open=True), multiple=True, help="A peak learning rate to try, in place of five."
)
@click.option("--epochs", type=click.IntRange(1), default=2, show_default=True, help="Passes over them.")
@click.option("--items", type=click.IntRange(1), default=300, show_default=True, help="Test examples to answer.")
@resumed_option
@device_option
@json_option
def compare(
    backbone: Path,
    data: tuple[Path, ...],
    seeds: int,
    groups: tuple[str, ...],
    limit: int,
    fewer: tuple[int, ...],
    lr: tuple[float, ...],
    epochs: int,
    items: int,
    out: Path,
    device: DeviceName,
    as_json: bool,
) -> None:
    """Compare a head of backward attention with simpler methods.

    They improve BACKBONE, a language model. On each task, every way gets the same training data and a learning rate
    chosen on a hold-out, and is scored once on the test split. Writes records.jsonl, a line after each training, and
    report.md.
    """
    inputs = {"BACKBONE": backbone, **{f"--data {path}": path.parent for path in data}}
    check_workspace("--out", out, inputs, settings=SETTINGS)
    names = [path.name for path in data]
    if len({*names}) < len(names):
        fix = "Give each module once."
        raise UsageError("--data", given=", ".join(names), expected="modules of different names", fix=fix)
    if max(fewer, default=0) >= limit:
        fix = "Give smaller numbers, or a larger --limit."
        raise UsageError("--fewer", given=max(fewer), expected=f"less than the --limit of {limit}", fix=fix)
    with loading_torch("loading torch, model and data"):
        from export.generate.model import Base, positions_of
        from export.papers.backward.methods import GROUPS, METHODS, read_task
        from export.papers.backward.run import ComparisonSettings, HeadComparison
        from export.papers.experiment import digest, run_experiment

        base = Base(backbone, device)
        tasks = {path.name: read_task(path, base.tokenizer, positions_of(base.model), limit) for path in data}
    chosen = {name for group in groups for name in GROUPS[group]}
    settings = ComparisonSettings(
        base=base.identity,
        data={path.name: digest(path.parent, f"*/{path.name}.txt") for path in data},
        limit=limit,
        fewer=tuple(sorted({*fewer})),
        epochs=epochs,
        items=items,
        methods=tuple(name for name in METHODS if name in chosen),
        **({"rates": lr} if lr else {}),
        seeds=seeds,
        processor=processor(),
    )
    run_experiment(HeadComparison(settings, out, base, tasks), out, as_json=as_json, plots=False)
