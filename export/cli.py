"""The commands ``fewheads train`` and ``fewheads export``."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table
from edge.errors import UsageError
from export.bundle.exported import RUNTIMES, print_exported
from export.bundle.outputs import check_run
from export.bundle.targets import targets_of
from export.finetune import answers_like_imported
from export.loading import loading_torch
from export.measures import print_measures
from export.options import (
    device_option,
    imported_data_option,
    replace_option,
    repository_option,
    run_data_dir_option,
    runs_option,
    seed_option,
    seeded,
    seeds_option,
    tensorboard_option,
    version_option,
)
from export.papers.calculator.specs import DEFAULT_NAMES, NAMES, SPECS
from export.papers.calculator.stack import NAMES as STACK_NAMES
from export.papers.looped import NAMES as LOOPED
from export.papers.looped.options import LoopedOptions, looped_options, train_looped
from export.training.runs import recorded
from export.training.watch import counting, watching

# torch takes seconds to import, so only the commands' bodies do it.
if TYPE_CHECKING:
    from export.training.device import DeviceName
    from export.training.runs import RunMetrics

_ALL = "calculator"


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@seed_option("For weights and the order of items.")
@seeds_option
@click.option("--epochs", type=click.IntRange(1), help="Calculators: at most so many.  [default: 50 to 200, by model]")
@looped_options
@runs_option("the runs, each of which becomes OUT/MODEL")
@device_option
@tensorboard_option
@replace_option("earlier runs of the same models")
@json_option
def train(
    models: tuple[str, ...],
    seed: int,
    seeds: int,
    epochs: int | None,
    looped: LoopedOptions,
    out: Path,
    device: DeviceName,
    tensorboard: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Train models and write a run directory for each.

    MODEL is calculator-NAME, with oracle, gate, softmax-gate, term-network, baseline, fnn2, fnn3, rnn2, lstm, bilstm,
    gru, transformer4, transformer5 or transformer0 for NAME; calculator for all of these but transformer0, which takes
    half an hour; calculator-stack, which computes longer expressions; looped-linear, looped-sparse, looped-tree or
    looped-relu.
    """
    names = _names(models)
    if epochs and set(names) <= set(LOOPED):
        raise UsageError("--epochs", given=epochs, expected="a calculator among the models", fix="Give --steps.")
    looped.check(names)
    if device == "cuda" and (small := next((name for name in names if name in STACK_NAMES), None)):
        fix = "Leave --device out for it."
        raise UsageError("--device", given=device, expected=f"cpu for {small}, which is small", fix=fix)
    runs = {name: seeded(name, seed, seeds) for name in names}
    for run in (run for of_model in runs.values() for run in of_model.values()):
        check_run("--out", out / run, {}, replace=replace)
    with loading_torch():
        from export.papers.calculator.stack.train import train_stack
        from export.papers.calculator.train import train_run
        from export.training.intervals import pooled
    results = []
    for name in names:
        trained = []
        for one, run in runs[name].items():
            with watching(run, lines=False) as watch:
                if name in LOOPED:
                    trained.append(
                        train_looped(name, out / run, looped, watch, seed=one, device=device, tensorboard=tensorboard)
                    )
                    continue
                if name in STACK_NAMES:
                    trained.append(
                        train_stack(name, out / run, seed=one, epochs=epochs, tensorboard=tensorboard, observer=watch)
                    )
                    continue
                trained.append(
                    train_run(
                        name,
                        out / run,
                        seed=one,
                        epochs=epochs,
                        device=device,
                        tensorboard=tensorboard,
                        observer=watch,
                    )
                )
        results.append((name, [str(out / run) for run in runs[name].values()], pooled(trained)))
    if as_json:
        print_json([{"model": name, "runs": runs, "metrics": metrics} for name, runs, metrics in results])
        return
    for name, places, metrics in results:
        (_print_calculator if name in SPECS else print_measures)(name, ", ".join(places), metrics)


@click.command()
@click.argument("runs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@repository_option("each")
@click.option("--name", help="Name of the one bundle that fine-tuned runs become; calculators have their model's name.")
@version_option
@click.option(
    "--tier-name",
    "tiers",
    multiple=True,
    help="Name of a tier; give one for each run, in their order.  [default: x1, xN for a run that was measured to be "
    "N times as fast, and xN-DEVICE for one that was planned to be so on another device]",
)
@click.option(
    "--artifacts",
    multiple=True,
    type=click.Choice(RUNTIMES),
    help="Runtime whose files a bundle of fine-tuned runs carries, repeatable; both by default. Without onnxruntime, a "
    "board serves it only where TensorRT runs.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Measure the files in INT8 on the hold-out and dev, of imported runs on a tenth of --data, and time those of "
    "all tiers on this machine, for the manifest; a minute for two thousand texts.",
)
@run_data_dir_option
@imported_data_option
@replace_option("existing bundles of that name and version")
@json_option
def export(
    runs: tuple[Path, ...],
    repository: Path,
    name: str | None,
    version: int,
    tiers: tuple[str, ...],
    artifacts: tuple[str, ...],
    measure: bool,
    data_dir: Path | None,
    data: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Convert runs to ONNX, check them against torch, and write them as bundles.

    Each calculator becomes a bundle, and looped runs of one function class, the full model first, become the tiers of
    one. Runs of `fewheads finetune`, `import` and `reduce`, the full model first, become the tiers of one bundle, NAME;
    each has a twin in INT8, TIER-int8. The table has a row for each file, because INT8 differs more from torch than
    FP32. `fewheads pack` makes a bundle of an ONNX file.
    """
    file = next((run for run in runs if run.suffix == ".onnx"), None)
    if file is not None:
        fix = f"Make a bundle of an ONNX file with 'fewheads pack {file} --name NAME --repository {repository}'."
        raise UsageError("RUN_DIR", given=str(file), expected="run directories", fix=fix)
    targets = targets_of(
        runs, repository, name=name, version=version, tiers=tiers, data_dir=data_dir, data=data, replace=replace
    )
    with loading_torch():
        from export.bundle.classifier import export_classifier, export_imported
        from export.papers.calculator.bundle import export_run, export_stack
        from export.papers.looped.bundle import export_looped
    results = []
    for target in targets:
        started = time.perf_counter()
        with counting(f"exporting {', '.join(map(str, target.runs))}") as on_rows:
            if target.name in LOOPED:
                exported = export_looped(target.runs, repository, tiers=target.tiers, version=version, replace=replace)
            elif target.tiers and answers_like_imported(recorded(target.runs[0])):
                exported = export_imported(
                    target.runs,
                    repository,
                    target.name,
                    target.data_dir,
                    tiers=target.tiers,
                    version=version,
                    artifacts=artifacts or RUNTIMES,
                    replace=replace,
                    on_rows=on_rows if measure else None,
                )
            elif target.tiers:
                assert target.data_dir is not None, "only imported runs may have none"
                exported = export_classifier(
                    target.runs,
                    repository,
                    target.name,
                    target.data_dir,
                    tiers=target.tiers,
                    version=version,
                    artifacts=artifacts or RUNTIMES,
                    replace=replace,
                    on_rows=on_rows if measure else None,
                )
            else:
                export_calculator = export_stack if target.name in STACK_NAMES else export_run
                exported = export_calculator(target.runs[0], repository, version=version, replace=replace)
        results.append((exported, time.perf_counter() - started))
    print_exported(results, as_json=as_json)


def _names(models: Sequence[str]) -> list[str]:
    names: dict[str, None] = {}
    for model in models:
        if model != _ALL and model not in (*NAMES, *STACK_NAMES, *LOOPED):
            choices = (_ALL, *NAMES, *STACK_NAMES, *LOOPED)
            close = difflib.get_close_matches(model, choices, n=1)
            fix = f"Did you mean {close[0]!r}?" if close else f"Take {_ALL!r} for all calculators of sums."
            raise UsageError("MODEL", given=model, expected=f"one of {', '.join(choices)}", fix=fix)
        names.update(dict.fromkeys(DEFAULT_NAMES if model == _ALL else [model]))
    return list(names)


def _print_calculator(name: str, runs: str, metrics: RunMetrics) -> None:
    """Print one row per split: its mean absolute error with its interval, the other metrics, the paper's figures.

    The scores follow, which are of several splits.
    """
    from export.papers.calculator.benchmark import PAPER_SCORE, SCORE, SPLIT

    paper = SPECS[name].paper
    found = {(measure.metric, measure.split): measure for measure in metrics.measures}
    scores = [found.pop((metric, SPLIT)) for metric in (SCORE, PAPER_SCORE)]
    others = list(dict.fromkeys(metric for metric, _ in found if metric != "mae"))
    published = {} if paper is None else paper.errors()
    papers = list(dict.fromkeys(metric for metric, _ in published))
    rows = []
    for split in dict.fromkeys(split for _, split in found):
        mae = found["mae", split]
        low, high = mae.interval or (mae.value, mae.value)
        row = [split, f"{mae.value:.3g} ± {(high - low) / 2:.2g}"]
        row += [f"{found[metric, split].value:.3g}" if (metric, split) in found else "" for metric in others]
        row += [f"{published[metric, split]:.3g}" if (metric, split) in published else "" for metric in papers]
        rows.append(row)
    title = f"{name}: {metrics.parameters:,} parameters, {metrics.epochs} epochs, {metrics.seconds:.1f} s, in {runs}"
    heads = ("split", "mae ± 95 %", *(metric.replace("_", " ") for metric in others), *(f"paper's {m}" for m in papers))
    print_table(title, heads, rows)
    ours, papers_formula = (f"{one.value:.4g}" for one in scores)
    printed = "" if paper is None else f", where the paper prints {paper.score:.4g}"
    click.echo(f"Score: {ours}; 1 is the baseline. By the paper's formula: {papers_formula}{printed}.")
    if paper is not None and paper.long_is_no_error:
        click.echo("The paper's figure for long expressions comes from a slip in its code, not from its network.")
