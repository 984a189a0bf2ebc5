"""The command ``fewheads export``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option
from edge.errors import UsageError
from export.bundle.exported import RUNTIMES, Exported, print_exported
from export.bundle.targets import Kind, Options, Target, targets_of
from export.papers import looped
from export.papers.calculator.specs import NAMES as SUMMING
from export.papers.calculator.stack import NAMES as STACK_NAMES
from export.training.loading import loading_torch
from export.training.options import (
    imported_data_option,
    replace_option,
    repository_option,
    run_data_dir_option,
    version_option,
)
from export.training.watch import counting

if TYPE_CHECKING:
    from export.bundle.accuracy import OnRows


def _export_sum(target: Target, options: Options, on_rows: OnRows) -> Exported:
    with loading_torch():
        from export.papers.calculator.bundle import export_run
    return export_run(target.runs[0], options.repository, version=options.version, replace=options.replace)


def _export_stack(target: Target, options: Options, on_rows: OnRows) -> Exported:
    with loading_torch():
        from export.papers.calculator.bundle import export_stack
    return export_stack(target.runs[0], options.repository, version=options.version, replace=options.replace)


def _export_looped(target: Target, options: Options, on_rows: OnRows) -> Exported:
    with loading_torch():
        from export.papers.looped.bundle import export_looped
    version, replace = options.version, options.replace
    return export_looped(target.runs, options.repository, tiers=target.tiers, version=version, replace=replace)


def _export_classifiers(target: Target, options: Options, on_rows: OnRows) -> Exported:
    with loading_torch():
        from export.bundle.classifier import Classifiers
        from export.bundle.exportable import export_bundle
    measure, version = options.measure, options.version
    model = Classifiers(
        target.runs, target.name, target.data, target.tiers, options.artifacts, on_rows if measure else None
    )
    return export_bundle(
        model.contents(), options.repository, version=version, replace=options.replace, measure=measure
    )


#: Kinds of runs whose bundles have the names of their models, and that of all others.
KINDS = (
    Kind(_export_sum, lambda config: config.model if config.model in SUMMING else None),
    Kind(_export_stack, lambda config: config.model if config.model in STACK_NAMES else None),
    Kind(
        _export_looped,
        lambda config: f"{looped.PREFIX}{config.arguments.get('function')}" if config.model == looped.MODEL else None,
        has_tiers=True,
    ),
)
NAMED = Kind(_export_classifiers, has_tiers=True)


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
    options = Options(repository, version, artifacts or RUNTIMES, measure, replace)
    targets = targets_of(runs, KINDS, NAMED, options, name=name, tiers=tiers, data_dir=data_dir, data=data)
    results = []
    for target in targets:
        started = time.perf_counter()
        with counting(f"exporting {', '.join(map(str, target.runs))}") as on_rows:
            exported = target.kind.export(target, options, on_rows)
        results.append((exported, time.perf_counter() - started))
    print_exported(results, as_json=as_json)
