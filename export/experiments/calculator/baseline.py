"""The command ``fewheads calculator baseline``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from edge.cli.output import json_option, print_json, print_table
from edge.errors import Raw, UsageError
from edge.files import write_result
from export.bundle.outputs import check_file
from export.loading import loading_torch
from export.options import DIRECTORY, replace_option
from export.training.runs import read_config


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=DIRECTORY)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write, of JSON.")
@replace_option("an earlier file")
@json_option
def baseline(runs: tuple[Path, ...], out: Path, replace: bool, as_json: bool) -> None:
    """Measure the baseline of the benchmark with runs of calculator-baseline, which differ in their seed.

    Scores refer to export/papers/calculator/baseline.json, which this command wrote from ten seeds.
    """
    check_file("--out", out, {f"RUN {run}": run for run in runs}, replace=replace)
    with loading_torch():
        from export.papers.calculator.benchmark import BASELINE_MODEL, Baseline, Errors, errors_of
        from export.papers.calculator.data import load
        from export.papers.calculator.runs import grouped, open_runs
        from export.papers.calculator.train import recipe_of

    trainer = str(recipe_of(BASELINE_MODEL))
    for run in runs:
        config = read_config(run)
        if (config.model, config.provenance.trainer) != (BASELINE_MODEL, trainer):
            given = Raw(f"{config.model}, trained by {config.provenance.trainer}")
            fix = f"Train some: fewheads train {BASELINE_MODEL} --seeds 10."
            raise UsageError(f"RUN {run}", given=given, expected=f"{BASELINE_MODEL}, trained by its recipe", fix=fix)
    opened = [run for group in grouped(open_runs(runs, load())).values() for run in group]
    if len(opened) < 2:
        fix = "Give more of them: an interval needs two."
        raise UsageError("RUN", given=Raw("one run"), expected="two or more seeds", fix=fix)
    found = Baseline.of({run.seed or 0: errors_of(run.values, load()) for run in opened})
    write_result(out, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    if as_json:
        print_json(found)
        return
    rows = [
        (name, getattr(found.mean, name), *found.intervals[name], min(values), max(values))
        for name in Errors.__struct_fields__
        for values in [[getattr(errors, name) for errors in found.seeds.values()]]
    ]
    print_table(f"{len(opened)} seeds, in {out}", ("error", "mean", "from", "to", "least", "most"), rows)
