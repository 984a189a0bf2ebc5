"""Latency of the tiers of a bundle with a program on a board, part by part: loops, decoders and heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from edge.bench.layer_latencies import PREDICTION
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Tier
from edge.bundles.programs import LoopProgram
from edge.errors import FewheadsError, Raw, UsageError
from edge.programs.tier_program import golden_loops, load_tier
from export.estimate.devices import Mode
from export.estimate.estimate import Row
from export.estimate.model import RUNTIME, TierModel
from export.estimate.parts import FirstTier, parts_of, tier_files


def part_rows(
    bundle: Bundle,
    mode: Mode,
    *,
    batches: Sequence[int],
    lengths: Sequence[int] = (),
    loops: float | None = None,
    on_tier: Callable[[int, int], None] = lambda done, tiers: None,
) -> tuple[Row, ...]:
    """Predict the parts of a request to each tier that has files for TensorRT.

    Args:
        loops: of a request to a looped model; None is the mean of the golden prompts on this machine, within the
            model's own limits.
    """
    manifest = bundle.manifest
    looped = isinstance(manifest.program, LoopProgram)
    tiers = [tier for tier in manifest.tiers if tier_files(tier, RUNTIME, manifest.roles)] or manifest.tiers[:1]
    rows: list[Row] = []
    first = FirstTier()
    for done, tier in enumerate(tiers):
        mean, source = (loops, "as given") if loops or not looped else _mean_loops(bundle, tier)
        files = {role: TierModel(bundle, tier, role) for role in manifest.roles}
        counted = all(file.launches is not None for file in files.values())
        artifacts = {role: file.artifact for role, file in files.items()}
        for part in parts_of(manifest, artifacts, bundle.read, batches=batches, lengths=lengths, loops=mean):
            found = part.predict(lambda role, shapes, files=files: files[role].predict(shapes, mode))  # type: ignore[misc]
            rows.append(
                Row(
                    tier=tier.name,
                    precision=files[manifest.roles[-1]].precision,
                    rows=part.rows,
                    tokens=part.tokens,
                    milliseconds=found.milliseconds,
                    prediction=found,
                    times_faster=first.times_faster(part.key, found.milliseconds),
                    counted=counted,
                    label=PREDICTION,
                    part=part.name,
                    loops=mean if part.whole else None,
                    loops_source=source if part.whole else "",
                )
            )
        on_tier(done + 1, len(tiers))
    return tuple(rows)


def check_options(bundle: Bundle, *, lengths: object, table: object, loops: float | None) -> None:
    """Raise a UsageError if an option does not apply to a bundle, looped or not."""
    looped = isinstance(bundle.manifest.program, LoopProgram)
    given = {"--lengths": lengths, "--latency-table": table} if looped else {"--loops": loops}
    for option, value in given.items():
        if value:
            expected = f"none for {bundle.manifest.name}, which is {'' if looped else 'not '}looped"
            raise UsageError(option, given=Raw(value), expected=expected, fix="Leave it out.")
    if table and bundle.manifest.roles != ("model",):
        expected = f"none for {bundle.manifest.name}, whose requests need several runs"
        raise UsageError("--latency-table", given=Raw(table), expected=expected, fix="Leave it out.")


def _mean_loops(bundle: Bundle, tier: Tier) -> tuple[float, str]:
    try:
        with closing(load_tier(bundle, "onnxruntime", tier=tier.name)) as program:
            return golden_loops(program), "the mean of the golden prompts, within the model's own limits"
    except FewheadsError:  # it has no file for ONNX Runtime
        assert isinstance(bundle.manifest.program, LoopProgram)
        return float(bundle.manifest.program.max_loops), "the model's limit, because this machine cannot run it"
