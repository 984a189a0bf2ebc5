"""Export of looped runs, or of unlooped ones, to one bundle: a tier for each run, smaller ones behind the full one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edge.bundles.manifest import Manifest, Measure, Tier
from edge.datatypes import TensorSpec
from edge.errors import Raw, UsageError
from export.bundle.accuracy import in_tier
from export.bundle.exportable import Contents, File, OnRows
from export.bundle.exported import FULL, RUNTIMES
from export.papers.looped import bundle_name
from export.papers.looped.tiers import MAX_BATCH_SIZE, PROGRAM, client_inputs, looped_tier, numbers, unlooped_tier
from export.papers.looped.train import load_run


class LoopedRuns(NamedTuple):
    """Runs of one function class, all looped or all unlooped: an :class:`export.bundle.exportable.Exportable`.

    Attributes:
        runs: the full model first.
        tiers: a name for each run.
        artifacts: of :data:`export.bundle.exported.RUNTIMES`.
    """

    runs: Sequence[Path]
    tiers: Sequence[str] = (FULL,)
    artifacts: Sequence[str] = RUNTIMES

    def contents(self, on_rows: OnRows | None) -> Contents:
        """See :class:`export.bundle.exportable.Exportable`; the measures are always those of the runs.

        Raises:
            UsageError: runs have prompts of different sizes.
        """
        files, loops = dict[str, File](), dict[str, float]()
        made, measures = list[Tier](), list[Measure]()
        loaded = [load_run(run) for run in self.runs]
        config, record = loaded[0][0].config, loaded[0][1]
        function, looped = record.arguments["function"], config.injection is not None
        for run, tier, (model, _, metrics) in zip(self.runs, self.tiers, loaded, strict=True):
            shape = model.config
            if (shape.points, shape.dims) != (config.points, config.dims):
                given = Raw(f"{shape.points} points of {shape.dims} dimensions")
                expected = f"{config.points} points of {config.dims}, as in {self.runs[0]}"
                raise UsageError(f"run {run}", given=given, expected=expected, fix="Make a bundle for each of them.")
            if looped:
                made.append(looped_tier(model, function, tier, self.artifacts, files, loops))
            else:
                made.append(unlooped_tier(model, function, tier, self.artifacts, files))
            measures += in_tier(metrics.measures, tier) if len(self.runs) > 1 else metrics.measures
        specs, profile = client_inputs(config)
        outputs = (*numbers("prediction", "residual"), TensorSpec("loops", "INT32", (-1, 1)))
        kind = "Looped" if looped else "Unlooped"
        manifest = Manifest(
            name=bundle_name(record.arguments),
            version=1,
            description=f"{kind} transformer of paper 003: {function} functions of {config.dims} dimensions in context",
            inputs=specs,
            outputs=outputs if looped else numbers("prediction"),
            max_batch_size=MAX_BATCH_SIZE,
            profile=profile,
            tiers=tuple(made),
            golden=f"{self.tiers[0]}.golden.npz",
            files={},
            provenance=record.provenance,
            program=PROGRAM if looped else None,
            measures=tuple(measures),
        )
        return Contents(manifest, files, loops)
