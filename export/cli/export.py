"""The command ``fewheads export``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edge.cli.options import FloatRange
from edge.cli.output import json_option, print_json, print_table, remark
from edge.errors import UsageError
from export.bundle.exported import RUNTIMES, print_exported
from export.bundle.new_bundles import Kind, NewBundle, new_bundles, no_cascade
from export.bundle.outputs import check_name
from export.papers import looped
from export.papers.calculator.specs import NAMES as SUMMING
from export.papers.calculator.stack import STACK
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
    from export.bundle.exportable import Exportable


def _sums(target: NewBundle) -> Exportable:
    from export.papers.calculator.bundle import SumCalculator

    return SumCalculator(target.runs[0])


def _stack(target: NewBundle) -> Exportable:
    from export.papers.calculator.bundle import StackCalculator

    return StackCalculator(target.runs[0])


def _looped(target: NewBundle) -> Exportable:
    from export.papers.looped.bundle import LoopedRuns

    return LoopedRuns(target.runs, target.tiers, target.artifacts)


def _classifiers(target: NewBundle) -> Exportable:
    from export.bundle.classifier import Classifiers
    from export.papers.adaptive.runs import open_compared

    return Classifiers(
        *(target.runs, target.name, target.data, target.tiers, target.artifacts, target.cascade), open_compared
    )


#: Kinds by the models of their runs; all other runs are classifiers, or embed.
KINDS = {
    **dict.fromkeys(SUMMING, Kind(_sums, lambda config: config.model, has_tiers=False)),
    STACK: Kind(_stack, lambda config: config.model, has_tiers=False),
    looped.MODEL: Kind(_looped, lambda config: looped.bundle_name(config.arguments)),
}
CLASSIFIERS = Kind(_classifiers)


@click.command()
@click.argument("runs", metavar="RUN_DIR|BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@repository_option("each")
@click.option("--name", help="Name of the one bundle that fine-tuned runs become; calculators have their model's name.")
@click.option(
    "--triton",
    is_flag=True,
    help="Of each BUNDLE, write REPOSITORY/NAME for Triton's backend onnxruntime: config.pbtxt and VERSION/model.onnx.",
)
@click.option("--tier", help="With --triton, the tier that becomes the model.  [default: the full one]")
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
    help="Runtime whose files a bundle carries, repeatable; both by default, and of calculators always. Without "
    "onnxruntime, a board serves it only where TensorRT runs.",
)
@click.option(
    "--cascade",
    metavar="SHARE",
    type=FloatRange(0, 1, min_open=True, max_open=True),
    help="Of classifiers, let the last run answer requests with tier=auto, and the first one those of which the last "
    "is least sure: this share of the hold-out.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Measure the files in INT8 on the hold-out and dev, of imported runs on a tenth of --data, and those of "
    "calculators on all splits, and time them on this machine, for the manifest; a minute for two thousand texts. "
    "Without, or of looped runs, it has what the runs recorded.",
)
@run_data_dir_option
@imported_data_option
@replace_option("existing bundles of that name and version")
@json_option
def export(
    runs: tuple[Path, ...],
    repository: Path,
    name: str | None,
    triton: bool,
    tier: str | None,
    version: int,
    tiers: tuple[str, ...],
    artifacts: tuple[str, ...],
    cascade: float | None,
    measure: bool,
    data_dir: Path | None,
    data: Path | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Export runs as bundles of ONNX files, checked against torch, or with --triton bundles as models of Triton.

    Each calculator becomes a bundle, and looped runs of one function class, the full model first, become the tiers of
    one; so do unlooped ones. Runs of `fewheads finetune`, `import` and `reduce`, the full model first, become the tiers
    of one bundle, NAME; each has a twin in INT8, TIER-int8, except those of `fewheads compare`. The table has a row for
    each file, because INT8 differs more from torch than FP32. `fewheads pack` makes a bundle of an ONNX file.
    """
    if triton:
        given = {"--version": version != 1, "--tier-name": tiers, "--artifacts": artifacts, "--cascade": cascade}
        _write_for_triton(runs, repository, name, tier, given | {"--data": data}, replace=replace, as_json=as_json)
        return
    if tier:
        raise UsageError("--tier", given=tier, expected="--triton with it", fix="Add --triton, or give --tier-name.")
    file = next((run for run in runs if run.suffix == ".onnx"), None)
    if file is not None:
        fix = f"Make a bundle of an ONNX file with 'fewheads pack {file} --name NAME --repository {repository}'."
        raise UsageError("RUN_DIR", given=str(file), expected="run directories", fix=fix)
    targets = new_bundles(
        runs,
        lambda config: KINDS.get(config.model, CLASSIFIERS),
        repository,
        version=version,
        replace=replace,
        name=name,
        tiers=tiers,
        artifacts=artifacts,
        data_dir=data_dir,
        data=data,
    )
    if cascade is not None:
        if any(target.kind is not CLASSIFIERS or len(target.runs) < 2 for target in targets):
            raise no_cascade(cascade)
        targets = [target._replace(cascade=cascade) for target in targets]
    with loading_torch():
        from export.bundle.exportable import export_bundle

        models = [target.kind.exportable(target) for target in targets]
    results = []
    for target, model in zip(targets, models, strict=True):
        started = time.perf_counter()
        with counting(f"exporting {', '.join(map(str, target.runs))}") as on_rows:
            counted = on_rows if measure else None
            exported = export_bundle(model, repository, version=version, replace=replace, on_rows=counted)
        results.append((exported, time.perf_counter() - started))
    print_exported(results, as_json=as_json)


def _write_for_triton(
    bundles: Sequence[Path],
    repository: Path,
    name: str | None,
    tier: str | None,
    others: Mapping[str, object],
    *,
    replace: bool,
    as_json: bool,
) -> None:
    from export.bundle.triton import (
        TritonModel,
        check_names,
        write_triton_model,
    )  # it imports protobuf, which no help needs

    for option in [option for option, value in others.items() if value]:
        raise UsageError(option, expected="--triton without it", fix="Leave it out: a bundle is written as it is.")
    if name and len(bundles) > 1:
        fix = "Give one bundle, or leave --name out."
        raise UsageError("--name", given=name, expected="one bundle with it", fix=fix)
    if name:
        check_name("--name", name)
    check_names(bundles)
    written = [write_triton_model(path, repository, name=name, tier=tier, replace=replace) for path in bundles]
    if as_json:
        print_json(written)
        return
    for one in written:
        for note in one.notes:
            remark(f"{one.model}: {note}.")
    columns = [field.replace("_", " ") for field in TritonModel.__struct_fields__ if field != "notes"]
    rows = [(*msgspec.structs.astuple(one)[:-2], ", ".join(one.inputs)) for one in written]
    print_table(f"Models of Triton in {repository}", columns, rows)
