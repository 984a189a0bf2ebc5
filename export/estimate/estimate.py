"""Latencies of the tiers of a bundle on a board, predicted: of a whole run, or part by part of loops and decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from edge.bench.layer_latencies import PREDICTION
from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.manifest import Tier
from edge.bundles.programs import LoopProgram
from edge.errors import FewheadsError, Raw, UsageError
from edge.programs.tier_program import golden_loops, load_tier
from export.estimate.devices import DEVICES, mode_of
from export.estimate.model import RUNTIME, TierModel, how_counted
from export.estimate.parts import Shapes, predict_tiers, tier_files
from export.estimate.roofline import ERRORS, Errors, Prediction, Regime

#: The least predicted speed-up that recommends a tier: below it, the error of a prediction is larger than the gain.
_WORTH = 1.15


class EstimatedRow(msgspec.Struct, frozen=True):
    """One tier for inputs of one size.

    Attributes:
        tokens: of each input; None where the model's inputs have a fixed size.
        prediction: the predicted latency, and its parts.
        times_faster: the latency of the first tier over this one's.
        counted: whether the kernels were counted in an engine; otherwise the prediction has those of the graph.
        part: of a model with a program: a file's role, or the loops of a whole request; empty for other models.
        loops: of a whole request of a looped model; ``loops_source`` says whose number it is.
    """

    tier: str
    precision: str
    rows: int
    tokens: int | None
    milliseconds: float
    prediction: Prediction
    times_faster: float
    counted: bool
    part: str = ""
    loops: float | None = None
    loops_source: str = ""


class BundleEstimate(msgspec.Struct, frozen=True):
    """Predictions for a bundle on a board.

    Attributes:
        errors: of the prediction on published measurements that it was not fitted to, by regime of a row.
        recommended_tier: the tier to take, if its accuracy suffices.
    """

    bundle: str
    device: str
    power_mode: str
    label: str
    errors: dict[Regime, Errors]
    kernels: str
    rows: tuple[EstimatedRow, ...]
    recommended_tier: str
    recommendation: str


def estimate_bundle(
    path: Path,
    device: str,
    power_mode: str,
    *,
    lengths: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    loops: float | None = None,
    on_tier: Callable[[int, int], None] = lambda done, tiers: None,
) -> BundleEstimate:
    """Predict the latency of each tier that has files for TensorRT.

    Args:
        lengths: tokens; empty for 32 and 128, as far as the bundle takes them.
        loops: of a request of a looped model; None is the mean of the golden prompts on this machine, within the
            model's own limits.

    Raises:
        UsageError: the mode does not exist, or the bundle does not take inputs of a given size.
        BundleError: the first tier has no file for TensorRT, or its work cannot be counted.
    """
    mode = mode_of(device, power_mode)
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    looped = isinstance(manifest.program, LoopProgram)
    for option, value in ({"--lengths": lengths} if looped else {"--loops": loops}).items():
        if value:
            expected = f"none for {manifest.name}, which is {'' if looped else 'not '}looped"
            raise UsageError(option, given=Raw(value), expected=expected, fix="Leave it out.")
    tiers = [tier for tier in manifest.tiers if tier_files(tier, RUNTIME, manifest.roles)] or manifest.tiers[:1]
    models: dict[str, dict[Role, TierModel]] = {}
    means: dict[str, tuple[float, str]] = {}
    for done, tier in enumerate(tiers):
        models[tier.name] = {role: TierModel(bundle, tier, role) for role in manifest.roles}
        if looped:
            means[tier.name] = (loops, "as given") if loops else _mean_loops(bundle, tier)
        on_tier(done + 1, len(tiers))

    def run(tier: str, role: Role, shapes: Shapes) -> Prediction:
        return models[tier][role].predict(shapes, mode)

    artifacts = {tier: {role: one.artifact for role, one in files.items()} for tier, files in models.items()}
    counts = {tier: mean for tier, (mean, _) in means.items()}
    predictions = predict_tiers(manifest, artifacts, bundle.read, run, batches=batches, lengths=lengths, loops=counts)
    rows = []
    for tier_name, part, prediction, times_faster in predictions:
        mean, source = means[tier_name] if part.whole else (None, "")
        files = models[tier_name]
        row = EstimatedRow(
            tier=tier_name,
            precision=files[manifest.roles[-1]].artifact.precision,
            rows=part.rows,
            tokens=part.tokens,
            milliseconds=prediction.milliseconds,
            prediction=prediction,
            times_faster=times_faster,
            part=part.name,
            counted=all(file.launches is not None for file in files.values()),
            loops=mean,
            loops_source=source,
        )
        rows.append(row)
    recommended, reason = _recommended([row for row in rows if row.loops] or rows)
    bounds = {regime: ERRORS[regime] for regime in ERRORS if any(regime in row.prediction.regimes for row in rows)}
    kernels = how_counted(all(row.counted for row in rows))
    name = DEVICES[device].name
    return BundleEstimate(str(path), name, power_mode, PREDICTION, bounds, kernels, tuple(rows), recommended, reason)


def _mean_loops(bundle: Bundle, tier: Tier) -> tuple[float, str]:
    try:
        with closing(load_tier(bundle, "onnxruntime", tier=tier.name)) as program:
            return golden_loops(program), "the mean of the golden prompts, within the model's own limits"
    except FewheadsError:  # it has no file for ONNX Runtime
        assert isinstance(bundle.manifest.program, LoopProgram)
        return float(bundle.manifest.program.max_loops), "the model's limit, because this machine cannot run it"


def _recommended(rows: Sequence[EstimatedRow]) -> tuple[str, str]:
    """Return the fastest tier and the reason; the first tier if no other is :data:`_WORTH` times as fast as it."""
    first = rows[0].tier
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row.tier, []).append(row.times_faster)
    means: Mapping[str, float] = {tier: sum(ratios) / len(ratios) for tier, ratios in speeds.items()}
    fastest = max(means, key=means.__getitem__)
    if means[fastest] < _WORTH:
        return first, f"no tier is predicted to be {_WORTH:g} times as fast as {first!r}"
    return fastest, f"predicted to be {means[fastest]:.2f} times as fast as {first!r}, if its accuracy suffices"
