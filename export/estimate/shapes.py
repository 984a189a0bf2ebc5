"""Predicted latency table of a directory of layer shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Tier
from edge.errors import UsageError
from edge.profiling.shapes import FLOOR, REST, ShapeSet
from edge.profiling.table import PREDICTION, Comparison, LatencyTable, Rest, Timing
from export.estimate.devices import DEVICES, mode_of
from export.estimate.model import RUNTIME, TierModel, how_counted
from export.estimate.roofline import Prediction
from export.estimate.sizes import input_shapes

#: The least time of a layer, as a share of the dense one.
_LEAST_SHARE = 0.01


def estimate_shapes(
    directory: Path,
    device: str,
    power_mode: str,
    *,
    precision: str = "fp16",
    lengths: tuple[int, ...] = (),
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> LatencyTable:
    """Predict the table that ``fewheads profile`` measures; its label says that it is a prediction.

    Args:
        lengths: tokens; empty for those of the directory.
    """
    mode = mode_of(device, power_mode)
    shapes = ShapeSet.read(directory)
    lengths = shapes.check_lengths(lengths)

    def predicted(name: str) -> tuple[dict[int, Prediction], bool]:
        bundle = Bundle.open(directory / name)
        # The models around the layers have one precision.
        model = TierModel(bundle, bundle.manifest.tiers[0] if name in (FLOOR, REST) else _tier(bundle, precision))
        inputs = bundle.manifest.inputs
        found = {n: model.predict(input_shapes(inputs, 0, 1, n), mode) for n in lengths}
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
        "runtime": RUNTIME,
        "runtime_version": "prediction",
        "kernels": how_counted(counted),
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


def _compared(floor: Prediction, dense: Prediction, other: Prediction) -> Comparison:
    beyond = dense.milliseconds - floor.milliseconds
    own = max(other.milliseconds - floor.milliseconds, _LEAST_SHARE * beyond)
    return Comparison(other.milliseconds, dense.milliseconds, beyond / own, 0, floor.milliseconds)


def _tier(bundle: Bundle, precision: str) -> Tier:
    found = {bundle.artifact(RUNTIME, tier.name).precision: tier for tier in bundle.manifest.tiers}
    if precision not in found:
        expected = f"one of {', '.join(found)}, as {bundle.path} has them"
        raise UsageError("--precision", given=precision, expected=expected, fix="Give one of these.")
    return found[precision]
