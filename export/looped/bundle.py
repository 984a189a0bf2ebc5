"""Export of looped runs to one bundle: a tier for each run, smaller ones behind the full one, and INT8 twins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Manifest, Measure
from edge.datatypes import TensorSpec
from edge.errors import Raw, UsageError
from export.bundle.exported import FULL, Exported
from export.bundle.latencies import with_latencies
from export.papers.looped import MODEL, PREFIX
from export.papers.looped.tier import MAX_BATCH_SIZE, PROGRAM, TierFiles, client_inputs, numbers, tier_files
from export.papers.looped.train import create
from export.training.checkpoint import load


def export_looped(
    runs: Sequence[Path],
    repository: str | Path,
    *,
    tiers: Sequence[str] = (FULL,),
    int8: bool = False,
    version: int = 1,
    replace: bool = False,
) -> Exported:
    """Write the bundle of some runs to ``repository/looped-FUNCTION-VERSION``.

    Args:
        runs: of one function class, the full model first.
        tiers: a name for each run.
        int8: whether each tier has a twin in INT8, ``TIER-int8``.

    Raises:
        UsageError: a model is not looped, runs have prompts of different sizes, or loops in INT8 are worse.
        GoldenError: ONNX Runtime's outputs differ from torch's by more than the tolerance.
    """
    made: list[TierFiles] = []
    measures: list[Measure] = []
    loaded = [load(run, {MODEL: create}) for run in runs]
    config = loaded[0][0].config
    function = loaded[0][1].arguments["function"]
    for run, tier, (model, _, metrics) in zip(runs, tiers, loaded, strict=True):
        shape = model.config
        if shape.injection is None:
            given, fix = Raw("an unlooped model"), "Train one without --unlooped."
            raise UsageError(f"run {run}", given=given, expected="a looped model", fix=fix)
        if (shape.points, shape.dims) != (config.points, config.dims):
            given = Raw(f"{shape.points} points of {shape.dims} dimensions")
            expected = f"{config.points} points of {config.dims}, as in {runs[0]}"
            raise UsageError(f"run {run}", given=given, expected=expected, fix="Make a bundle for each of them.")
        made += tier_files(model, function, tier, int8=int8)
        of = f", tier {tier}" if len(runs) > 1 else ""
        measures += (msgspec.structs.replace(measure, split=f"{measure.split}{of}") for measure in metrics.measures)
    name = f"{PREFIX}{function}"
    specs, profile = client_inputs(config)
    manifest = Manifest(
        name=name,
        version=version,
        description=f"Looped transformer of paper 003: {function} functions of {config.dims} dimensions in context",
        inputs=specs,
        outputs=(*numbers(), TensorSpec("loops", "INT32", (-1, 1))),
        max_batch_size=MAX_BATCH_SIZE,
        profile=profile,
        tiers=tuple(one.tier for one in made),
        golden=f"{tiers[0]}.golden.npz",
        files={},
        provenance=loaded[0][1].provenance,
        program=PROGRAM,
        measures=tuple(measures),
    )
    files = {file: data for one in made for file, data in one.files.items()}
    manifest = with_latencies(manifest, files, loops={one.tier.name: one.loops for one in made})
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported.of(written, {file: value for one in made for file, value in one.differences.items()})
