"""The command ``fewheads calculator lengths``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from edge.cli.output import json_option, print_json, print_table
from edge.files import write_whole
from export.bundle.outputs import check_workspace
from export.figures import new_figure, write_figure
from export.options import DIRECTORY, out_option, plots_option
from export.papers.calculator.run_arguments import check_calculators, not_a_seed
from export.papers.calculator.stack import NAMES
from export.training.runs import METRICS, RunConfig, RunMetrics, decode, read_config

RESULTS, REPORT, FIGURE = "results.json", "report.md", "right-by-length.png"
_INTRODUCTION = (
    "Written by `fewheads calculator lengths`. Shares of right answers and relative errors are means over seeds; "
    "*largest error* is the mean of each seed's largest. In parentheses: an interval that covers Student's 95 % "
    "interval over the seeds and Wilson's over the items."
)
_FAMILIES = {"operands": "number of operands, parentheses at most 2 deep", "depth": "depth of parentheses, 8 operands"}


class Trained(msgspec.Struct, frozen=True):
    """A run: its model, seed and metrics."""

    model: str
    seed: int | None
    metrics: RunMetrics


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=DIRECTORY)
@plots_option
@out_option("Directory for results.json, report.md and the figure.")
@json_option
def lengths(runs: tuple[Path, ...], plots: bool, out: Path, as_json: bool) -> None:
    """Show how calculators do on longer and deeper expressions than they learnt from.

    RUN is one of calculator-stack, calculator-token-lstm or calculator-token-transformer. Several runs of one model are
    taken for several seeds.
    """
    check_workspace("--out", out, {f"RUN {run}": run for run in runs}, settings=RESULTS)
    check_calculators(runs, NAMES)
    if plots:
        new_figure(1, 1, without="give --no-plots")
    trained = []
    earlier: dict[Path, RunConfig] = {}
    for run in runs:
        config = read_config(run)
        _check_seed(run, config, earlier)
        earlier[run] = config
        trained.append(Trained(config.model, config.provenance.seed, decode(run / METRICS, RunMetrics)))
    groups = {name: [one for one in trained if one.model == name] for name in NAMES}
    pooled = {name: _pooled(group) for name, group in groups.items() if group}
    heads, rows = _table(pooled)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(trained), indent=1) + b"\n")
    write_whole(out / REPORT, _report(groups, heads, rows).encode())
    if plots:
        _draw(pooled, out / FIGURE)
    if as_json:
        print_json({name: list(found.values()) for name, found in pooled.items()})
        return
    print_table(f"{len(trained)} runs, in {out}", heads, rows)


def _check_seed(run: Path, config: RunConfig, earlier: Mapping[Path, RunConfig]) -> None:
    """Raise a UsageError if an earlier run of the same model has the same seed, or another training."""
    for path, other in earlier.items():
        if other.model != config.model:
            continue
        if other.provenance.seed == config.provenance.seed:
            raise not_a_seed(run, f"seed {config.provenance.seed}, as in {path}")
        if other.provenance.trainer != config.provenance.trainer:
            raise not_a_seed(run, f"another training than {path}")


def _pooled(group: Sequence[Trained]) -> dict[tuple[str, str], Measure]:
    """Return the measures over seeds by metric and split; intervals of shares are at least as wide as Wilson's."""
    from export.papers.calculator.benchmark import with_items
    from export.training.intervals import across_seeds

    runs = [one.metrics.measures for one in group]
    return {
        (one.metric, one.split): with_items(one) if one.metric == "right" else one
        for one in (across_seeds(runs) if len(runs) > 1 else runs[0])
    }


def _table(
    pooled: Mapping[str, Mapping[tuple[str, str], Measure]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and rows: for each split and model the share of right answers, the median and the largest error."""
    splits = [split for metric, split in next(iter(pooled.values())) if metric == "right"]
    short = {name: name.removeprefix("calculator-") for name in pooled}
    heads = ["split", "items"]
    for name in short.values():
        heads += [f"{name}: right, %", "median error", "largest error"]
    rows = []
    for split in splits:
        row = [split, str(next(iter(pooled.values()))["right", split].n)]
        for found in pooled.values():
            right = found["right", split]
            low, high = right.interval or (right.value, right.value)
            row.append(f"{100 * right.value:.1f} ({100 * low:.1f} … {100 * high:.1f})")
            row += [f"{found[f'{which}_relative_error', split].value:.2g}" for which in ("median", "largest")]
        rows.append(tuple(row))
    return tuple(heads), rows


def _report(groups: Mapping[str, Sequence[Trained]], heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from export.papers.experiment import markdown_table

    lines = ["# Calculators for longer expressions", "", _INTRODUCTION, ""]
    for name, group in groups.items():
        if group:
            shares = [each for one in group for each in one.metrics.measures if each.metric == "exact_restarts"]
            machines = sum(each.n for each in shares)
            note = (
                f", {round(sum(each.value * each.n for each in shares))} of {machines} machines exact" if shares else ""
            )
            lines.append(f"- {name}: {group[0].metrics.parameters:,} parameters, {len(group)} seeds{note}")
    return "\n".join([*lines, "", *markdown_table(heads, rows, texts=1)]) + "\n"


def _draw(pooled: Mapping[str, Mapping[tuple[str, str], Measure]], path: Path) -> None:
    figure = new_figure(10, 4, without="give --no-plots")
    for column, (family, label) in enumerate(_FAMILIES.items(), start=1):
        axes = figure.add_subplot(1, 2, column)
        for (name, found), marker in zip(pooled.items(), "osD", strict=False):
            shares = {
                int(split.partition("/")[2]): (one.value, *(one.interval or (one.value, one.value)))
                for (metric, split), one in found.items()
                if metric == "right" and split.startswith(f"{family}/")
            }
            value, low, high = 100 * np.array([*shares.values()]).T
            errors = np.clip([value - low, high - value], 0, None)
            axes.errorbar([*shares], value, errors, marker=marker, capsize=2, label=name.removeprefix("calculator-"))
        axes.axvline({"operands": 4, "depth": 2}[family], color="0.6", linestyle=":", label="most in training")
        axes.set(xlabel=label, ylabel="right answers, %", ylim=(-3, 103))
        axes.grid(alpha=0.3)
    axes.legend()
    write_figure(figure, path)
