"""The command ``fewheads route``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table, stdout, working
from edge.files import write_result
from export.bundle.outputs import check_file
from export.finetune import data_inputs, labelled_data
from export.report.table import Table
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, replace_option, run_data_dir_option
from export.training.runs import recorded

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.reduce.route import SplitReport

_CONTROLS = ("static", "shuffled", "oracle")


@click.command()
@click.argument("full", metavar="FULL_RUN", type=DIRECTORY)
@click.argument("lean", metavar="LEAN_RUN", type=DIRECTORY)
@run_data_dir_option
@click.option(
    "--cost-ratio",
    type=float,
    required=True,
    help="LEAN_RUN's time over FULL_RUN's, 0 to 1: the inverse of the speed-up that 'fewheads reduce' measured.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write all figures there, as JSON.")
@replace_option("a file at --out")
@json_option
def route(
    full: Path, lean: Path, data_dir: Path | None, cost_ratio: float, out: Path | None, replace: bool, as_json: bool
) -> None:
    """Find out whether a choice between two tiers for each input pays.

    A cascade runs the full tier where the lean one is unsure; a linear router decides in advance. Each is compared with
    controls at the same mean cost. Half of the hold-out fits, the other half chooses and decides, dev is only reported.
    """
    config = recorded(full)
    data_dir = labelled_data(config, data_dir)
    inputs = {"FULL_RUN": full, "LEAN_RUN": lean, **data_inputs(config, data_dir)}
    if out:
        check_file("--out", out, inputs, replace=replace)
    with loading_torch():
        from export.reduce.route import route_run
    with working("routing"):
        routed = route_run(full, lean, data_dir, cost_ratio)
    if out:
        write_result(out, msgspec.json.format(msgspec.json.encode(routed), indent=2) + b"\n")
    if as_json:
        print_json(routed)
    else:
        for split in routed.splits:
            _print(routed.task, split)
        stdout.print(f"{routed.diagnosis.recommendation}: {routed.diagnosis.reason}", markup=False, highlight=False)


def _print(task: str, split: SplitReport) -> None:
    title = (
        f"{task}, {split.split}: {split.items} items, lean {split.lean_accuracy:.4f}, full {split.full_accuracy:.4f}, "
        f"{split.differing:.1%} answered differently; accuracies at the same mean cost"
    )
    judged = [policy.judged for policy in split.policies]
    accuracies = [
        (one.policy, one.threshold, one.mean_cost, one.accuracy, *(policy.controls[name] for name in _CONTROLS))
        for one, policy in zip(judged, split.policies, strict=True)
    ]
    print_table(title, ("policy", "full below", "mean cost", "accuracy", *_CONTROLS), accuracies)
    gains = [(one.policy, one.over_static, one.over_shuffled) for one in judged]
    Table("95 % intervals", ("policy", "gain over static", "gain over shuffled"), gains).print()
