"""Predicted latencies of the tiers of a bundle on a board, and of the shapes of a reduction grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Manifest, Tier
from edge.datatypes import TensorSpec
from edge.errors import BackendError, UsageError
from edge.profiling.shapes import FLOOR, REST, ShapeSet, open_bundle
from edge.profiling.table import PREDICTION, Comparison, LatencyTable, Rest, Timing
from edge.runtimes import tensorrt_package
from export.estimate.devices import DEVICES, Mode, mode_of
from export.estimate.kernels import COMPUTE_CAPABILITY, kernels
from export.estimate.measured import MeasuredTable
from export.estimate.operations import Halves, halves_of, work_of
from export.estimate.roofline import BAND, BIAS, Prediction, predict, usual_kernels

_RUNTIME = "tensorrt"
#: Of a layer that predicts no more than an empty model, as a share of the dense layer.
_LEAST_SHARE = 0.01
#: How many times faster a tier has to be predicted before it is recommended: below it, the fuller one is as good a bet.
_WORTH = 1.15


class Row(msgspec.Struct, frozen=True):
    """One tier for inputs of one size.

    Attributes:
        tier: its name.
        precision: of the tier's file.
        rows: the batch.
        tokens: of each input; None where the model's inputs have a fixed size.
        milliseconds: the latency: predicted, or put together from a measured latency table.
        prediction: of the latency, and its parts.
        times_faster: the latency of the first tier over this one's, both measured or else both predicted.
        counted: whether the kernels were counted in an engine; otherwise they are those of the fit.
        label: that the latency is a prediction, or whose measurements it is put together from.
    """

    tier: str
    precision: str
    rows: int
    tokens: int | None
    milliseconds: float
    prediction: Prediction
    times_faster: float
    counted: bool
    label: str


class Estimate(msgspec.Struct, frozen=True):
    """Predictions for a bundle on a board.

    Attributes:
        bundle: its directory.
        device: the board, for people.
        power_mode: of the board.
        label: that the device, power mode and rows without another label are predictions.
        band: the error band, as a share of each latency.
        bias: the known direction of the error.
        kernels: how launches were counted.
        rows: of all tiers and sizes.
        recommended_tier: the tier to take, if its accuracy suffices.
        recommendation: the reason.
    """

    bundle: str
    device: str
    power_mode: str
    label: str
    band: float
    bias: str
    kernels: str
    rows: tuple[Row, ...]
    recommended_tier: str
    recommendation: str


def estimate_bundle(
    path: Path,
    device: str,
    power_mode: str,
    *,
    lengths: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    table: Path | None = None,
    on_tier: Callable[[int, int], None] = lambda done, tiers: None,
) -> Estimate:
    """Predict the latency of each tier of a bundle.

    Args:
        path: of the bundle.
        device: a name in :data:`export.estimate.devices.DEVICES`.
        power_mode: of the board.
        lengths: tokens; empty for 32 and 128, as far as the bundle takes them.
        batches: rows.
        table: a measured latency table, whose times replace predictions of tiers in its precision, for one row.
        on_tier: called with how many tiers are done, of how many.

    Raises:
        UsageError: there is no such mode, the bundle takes no input of a size that was given, or the table is of
            another model or power mode.
        BundleError: the bundle is broken, or has no file for TensorRT whose work can be counted.
    """
    mode = mode_of(device, power_mode)
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    sizes = _sizes(manifest, tuple(lengths), tuple(batches))
    measured = MeasuredTable.read(table, power_mode) if table else None
    rows: list[Row] = []
    dense: dict[tuple[int, int | None, str], float] = {}  # by batch, tokens and label
    layers = 0
    for done, tier in enumerate(manifest.tiers):
        model = _Model(bundle, tier)
        for batch, tokens in sizes:
            shapes = _shapes(manifest.inputs, manifest.max_batch_size, batch, tokens)
            found = model.predict(shapes, mode)
            milliseconds, label = found.milliseconds, PREDICTION
            faster = dense.setdefault((batch, tokens, label), milliseconds) / milliseconds
            if measured and batch == 1:
                dim = int(measured.table.key["dim"])
                halves = model.halves(shapes, dim)
                if not rows:
                    measured.check_model(halves, dim)
                    layers = len(halves.attention)
                own = measured.milliseconds(halves, layers, model.precision, tokens)
                if own is not None:
                    milliseconds, label = own, f"sum of layers measured on {measured.table.name}"
                    if not done:
                        dense[batch, tokens, label] = own
                    # A measurement and a prediction make no ratio: without a measured first tier it stays predicted.
                    faster = dense.get((batch, tokens, label), faster * own) / own
            counted = model.launches is not None
            rows.append(Row(tier.name, model.precision, batch, tokens, milliseconds, found, faster, counted, label))
        on_tier(done + 1, len(manifest.tiers))
    tier_name, reason = _recommended(rows)
    all_counted = all(row.counted for row in rows)
    return Estimate(
        str(path),
        DEVICES[device].name,
        power_mode,
        PREDICTION,
        BAND,
        BIAS,
        _how_counted(all_counted),
        tuple(rows),
        tier_name,
        reason,
    )


def estimate_shapes(
    directory: Path,
    device: str,
    power_mode: str,
    *,
    precision: str = "fp16",
    lengths: tuple[int, ...] = (),
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> LatencyTable:
    """Predict what ``fewheads profile`` would measure; the table is marked as a prediction.

    Args:
        directory: from ``fewheads shapes``.
        device: a name in :data:`export.estimate.devices.DEVICES`.
        power_mode: of the board.
        precision: ``fp16`` or ``int8``.
        lengths: tokens; empty for those of the directory.
        on_shape: called with how many shapes are done, of how many.

    Raises:
        UsageError: the directory or an option does not fit.
        BundleError: a bundle is broken, or has no file for TensorRT.
    """
    mode = mode_of(device, power_mode)
    shapes = ShapeSet.read(directory)
    lengths = shapes.check_lengths(lengths)

    def predicted(name: str) -> tuple[dict[int, Prediction], bool]:
        bundle = open_bundle(directory, name)
        # The models around the layers have one precision.
        model = _Model(bundle, bundle.manifest.tiers[0] if name in (FLOOR, REST) else _tier(bundle, precision))
        inputs = bundle.manifest.inputs
        found = {n: model.predict(_shapes(inputs, 0, 1, n), mode) for n in lengths}
        return found, model.launches is not None

    floor, counted = predicted(FLOOR)
    dense, _ = predicted(shapes.dense.name)
    timings: list[Timing] = []
    for done, shape in enumerate(shapes.shapes):
        found, _ = predicted(shape.name)
        timings += [Timing(shape, n, _compared(floor[n], dense[n], found[n])) for n in lengths]
        on_shape(done + 1, len(shapes.shapes))
    rest, _ = predicted(REST)
    layer = {n: dense[n].milliseconds - floor[n].milliseconds for n in lengths}
    key = {
        "runtime": _RUNTIME,
        "runtime_version": "prediction",
        "kernels": _how_counted(counted),
        "provider": "GPU",
        "precision": precision,
        "device": DEVICES[device].name,
        "power_mode": power_mode,
        **shapes.model,
    }
    return LatencyTable(
        key=key,
        timings=tuple(timings),
        rest=tuple(Rest(n, rest[n].milliseconds, rest[n].milliseconds / layer[n]) for n in lengths),
        label=PREDICTION,
    )


class _Model:
    """One tier's file, with the kernels of its engine where they can be counted."""

    def __init__(self, bundle: Bundle, tier: Tier) -> None:
        artifact = bundle.artifact(_RUNTIME, tier.name)
        self.precision = artifact.precision
        self._subject = f"model {bundle.path / artifact.file}"
        self._data = bundle.read(artifact.file)
        names = kernels(self._data, bundle.manifest.tensors(artifact).profile)
        self.launches = len(names) if names else None

    def halves(self, shapes: Mapping[str, tuple[int, ...]], dim: int) -> Halves:
        """Return the halves of the layers."""
        return halves_of(self._data, shapes, dim, self._subject)

    def predict(self, shapes: Mapping[str, tuple[int, ...]], mode: Mode) -> Prediction:
        """Predict a run for inputs of these shapes."""
        work = work_of(self._data, shapes, self._subject)
        return predict(work, self.launches or usual_kernels(work), mode)


def _compared(floor: Prediction, dense: Prediction, other: Prediction) -> Comparison:
    beyond = dense.milliseconds - floor.milliseconds
    own = max(other.milliseconds - floor.milliseconds, _LEAST_SHARE * beyond)
    return Comparison(other.milliseconds, dense.milliseconds, beyond / own, 0, floor.milliseconds)


def _tier(bundle: Bundle, precision: str) -> Tier:
    found = {bundle.artifact(_RUNTIME, tier.name).precision: tier for tier in bundle.manifest.tiers}
    if precision not in found:
        expected = f"one of {', '.join(found)}, as {bundle.path} has them"
        raise UsageError("--precision", given=precision, expected=expected, fix="Give one of these.")
    return found[precision]


def _sizes(manifest: Manifest, lengths: tuple[int, ...], batches: tuple[int, ...]) -> list[tuple[int, int | None]]:
    """Return batch and tokens of the inputs to predict for."""
    for batch in batches:
        if batch > max(manifest.max_batch_size, 1):
            expected = f"at most {max(manifest.max_batch_size, 1)}, as the bundle has it"
            raise UsageError("--batch", given=batch, expected=expected, fix="Give a smaller batch.")
    axis = 1 if manifest.max_batch_size else 0
    free = [spec for spec in manifest.inputs if -1 in spec.shape[axis:]]
    if not free:
        return [(batch, None) for batch in batches]
    name = free[0].name
    allowed = manifest.profile[name]
    position = free[0].shape.index(-1, axis)
    least, most = allowed.min[position], allowed.max[position]
    for tokens in lengths:
        if not least <= tokens <= most:
            expected = f"{least} to {most}, as the bundle takes {name!r}"
            raise UsageError("--lengths", given=tokens, expected=expected, fix="Give lengths in this range.")
    usual = tuple(tokens for tokens in (32, 128) if least <= tokens <= most) or (allowed.opt[position],)
    return [(batch, tokens) for tokens in lengths or usual for batch in batches]


def _shapes(
    inputs: Sequence[TensorSpec], max_batch_size: int, batch: int, tokens: int | None
) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for spec in inputs:
        sizes = list(spec.shape)
        if max_batch_size:
            sizes[0] = batch
        shapes[spec.name] = tuple(tokens or 1 if size == -1 else size for size in sizes)
    return shapes


def _recommended(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the fullest tier that no other one beats by more than the error of a ratio, and the reason."""
    first = rows[0]
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row.tier, []).append(row.times_faster)
    means = {tier: sum(found) / len(found) for tier, found in speeds.items()}
    fastest = max(means, key=means.__getitem__)
    if means[fastest] < _WORTH:
        return first.tier, f"no tier is predicted to be {_WORTH:g} times as fast as {first.tier!r}"
    return fastest, f"predicted to be {means[fastest]:.2f} times as fast as {first.tier!r}, if its accuracy suffices"


def _how_counted(counted: bool) -> str:
    if not counted:
        return "ten kernels for a layer, as in the fit: TensorRT-RTX is not installed or does not compile the model"
    try:
        release = tensorrt_package.version("tensorrt_rtx")
    except BackendError:
        release = "unknown"
    return f"kernels counted in the engine of TensorRT-RTX {release} for {COMPUTE_CAPABILITY}"
