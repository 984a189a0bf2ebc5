"""Latencies of the tiers of a bundle on a board: predicted, or put together from a measured latency table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bench.layer_latencies import PREDICTION, LayerLatencies, Shape, check_key
from edge.bundles.bundle import Bundle
from export.estimate.devices import DEVICES, mode_of
from export.estimate.estimate import Row, check_options, part_rows
from export.estimate.model import RUNTIME, TierModel, how_counted
from export.estimate.operations import Halves
from export.estimate.roofline import ERRORS, Errors, Regime
from export.estimate.sizes import check_sizes, input_shapes

#: The least predicted speed-up that recommends a tier: below it, the error of a prediction is larger than the gain.
_WORTH = 1.15


class Estimate(msgspec.Struct, frozen=True):
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
    rows: tuple[Row, ...]
    recommended_tier: str
    recommendation: str


_FIX = "Give the table of this board and power mode with TensorRT, or leave --latency-table out."


class MeasuredTable(NamedTuple):
    """A measured latency table, and its file."""

    path: Path
    table: LayerLatencies

    @classmethod
    def read(cls, path: Path, device: str, power_mode: str) -> MeasuredTable:
        """Read a table.

        Raises:
            UsageError: it is not a table, is a prediction itself, or of another runtime, board or power mode.
        """
        table = LayerLatencies.read(path)
        board = table.key.get("device", "")
        name = DEVICES[device].name
        check_key(
            f"latency table {path}",
            table.key | {"label": table.label, "device": name if _is(board, device) else board},
            {"label": "measured", "runtime": RUNTIME, "device": name, "power_mode": power_mode},
            _FIX,
        )
        return cls(path, table)

    def check_model(self, dense: Halves, dim: int) -> None:
        """Check that the table is of this model."""
        shapes = {Shape(*heads, units) for heads, units in zip(dense.attention, dense.feed_forward, strict=False)}
        found = " and ".join(sorted(shape.name for shape in shapes)) or "no layers"
        check_key(
            f"latency table {self.path}",
            self.table.key,
            {"dim": str(dim), "dense": found},
            "Give a table of this model, or leave --latency-table out.",
        )

    def milliseconds(self, halves: Halves, layers: int, precision: str, tokens: int | None) -> float | None:
        """Return the latency of a tier; None where the table lacks its precision, length or a shape.

        Args:
            layers: of the original; the halves that the tier lacks were removed.
        """
        if precision != self.table.key.get("precision") or tokens is None:
            return None
        dense = next((t.shape for t in self.table.timings if t.shape.name == self.table.key.get("dense")), None)
        rest = self.table.find_rest(tokens)
        whole = self.table.find(dense, tokens) if dense else None
        if dense is None or whole is None or rest is None:
            return None
        removed = [(0, 0)] * (layers - len(halves.attention)), [0] * (layers - len(halves.feed_forward))
        shapes = [Shape(*heads, dense.ffn_dim) for heads in (*halves.attention, *removed[0])]
        shapes += [Shape(dense.num_heads, dense.head_dim, units) for units in (*halves.feed_forward, *removed[1])]
        found = [self.table.find(shape, tokens) for shape in shapes]
        times = [1 / comparison.ratio - 0.5 for comparison in found if comparison]
        if len(times) < len(shapes):
            return None
        return (whole.dense_milliseconds - whole.floor_milliseconds) * (sum(times) + rest.dense_layers)


def _is(board: str, device: str) -> bool:
    """Return whether a name such as "NVIDIA Jetson Orin Nano Super Developer Kit" names a device."""
    words = board.lower().split()
    return {"orin", "nano"} <= set(words) and ("super" in words) == device.endswith("super")


def estimate_bundle(
    path: Path,
    device: str,
    power_mode: str,
    *,
    lengths: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    table: Path | None = None,
    loops: float | None = None,
    on_tier: Callable[[int, int], None] = lambda done, tiers: None,
) -> Estimate:
    """Predict the latency of each tier of a bundle.

    Args:
        lengths: tokens; empty for 32 and 128, as far as the bundle takes them.
        table: a measured latency table; its times replace the predictions of tiers in its precision for one row.
        loops: of a request of a looped model; None is the mean of the golden prompts.

    Raises:
        UsageError: the mode does not exist, the bundle does not take inputs of a given size, or the table is of another
            model, runtime, board or power mode.
    """
    mode = mode_of(device, power_mode)
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    check_options(bundle, lengths=lengths, table=table, loops=loops)
    if manifest.roles != ("model",):
        found_rows = part_rows(bundle, mode, batches=batches, lengths=lengths, loops=loops, on_tier=on_tier)
        return _estimate(path, device, power_mode, found_rows)
    sizes = check_sizes(manifest.inputs, manifest.profile, manifest.max_batch_size, lengths, batches)
    measured = MeasuredTable.read(table, device, power_mode) if table else None
    rows: list[Row] = []
    dense: dict[tuple[int, int | None, str], float] = {}  # by batch, tokens and label
    layers = 0
    for done, tier in enumerate(manifest.tiers):
        model = TierModel(bundle, tier)
        for batch, tokens in sizes:
            shapes = input_shapes(manifest.inputs, manifest.profile, manifest.max_batch_size, batch, tokens)
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
    return _estimate(path, device, power_mode, rows)


def _estimate(path: Path, device: str, power_mode: str, rows: Sequence[Row]) -> Estimate:
    tier_name, reason = _recommended([row for row in rows if row.loops] or rows)
    return Estimate(
        str(path),
        DEVICES[device].name,
        power_mode,
        PREDICTION,
        {regime: ERRORS[regime] for regime in ERRORS if any(regime in row.prediction.regimes for row in rows)},
        how_counted(all(row.counted for row in rows)),
        tuple(rows),
        tier_name,
        reason,
    )


def _recommended(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the fastest tier and the reason; the first tier if no other is :data:`_WORTH` times as fast as it."""
    first = rows[0]
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row.tier, []).append(row.times_faster)
    means = {tier: sum(found) / len(found) for tier, found in speeds.items()}
    fastest = max(means, key=means.__getitem__)
    how = "predicted" if any(row.label == PREDICTION for row in rows) else "measured"
    if means[fastest] < _WORTH:
        return first.tier, f"no tier is {how} to be {_WORTH:g} times as fast as {first.tier!r}"
    return fastest, f"{how} to be {means[fastest]:.2f} times as fast as {first.tier!r}, if its accuracy suffices"
