"""The plan of a reduction that is trained afterwards: whole layers, spread over the depth.

It needs no losses. ``export/reduce/RESULTS.md`` has the race that these layers won.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from edge.errors import Raw
from export.errors import PlanError
from export.models.transformer import LayerShape, TransformerConfig
from export.reduce.grid import UNITS, Grid, Times, widest
from export.reduce.plan import macs_per_token, words_of

#: Least share of the hidden units of several layers: the largest cut of which it was measured that it keeps up. With a
#: twelfth of their units, four layers lose to three.
_LEAST_SHARE = 0.75


def spread_shapes(
    config: TransformerConfig, times: Times, target_speedup: float, subject: str = "target speed-up"
) -> list[LayerShape | None]:
    """Return the shape of each layer; None leaves it out.

    Layers stay at equal distances, the first and the last among them, or only the last. They may lose a quarter of
    their hidden units; of the plans that are fast enough, it is the one with the most weights. If even one layer is too
    slow, it loses heads and hidden units by the same share.

    Args:
        times: of the options.
        subject: of the error.

    Raises:
        PlanError: no plan is that fast; the message has the fastest one and its speed-up.
    """
    plans = list(_plans(config, times.grid))
    fast_enough = [shapes for shapes in plans if times.speedup(config.layers, shapes) >= target_speedup]
    if fast_enough:
        return max(fast_enough, key=lambda shapes: sum(macs_per_token(config.dim, one, 0) for one in shapes if one))
    fastest = min(plans, key=times.of)
    given = Raw(f"{target_speedup:g}x")
    expected = f"at most {times.speedup(config.layers, fastest):.2f}x, with {words_of(fastest)}"
    raise PlanError(subject, given=given, expected=expected, fix="Ask for less, or let the search choose the shapes.")


def _plans(config: TransformerConfig, grid: Grid) -> Iterator[list[LayerShape | None]]:
    """Yield all plans, of each number of layers with fewer and fewer hidden units."""
    layers, units = config.layers, widest(config).ffn_dim
    shares = [min(1.0, number / units) for number in range(-(-units // UNITS) * UNITS, 0, -UNITS)] or [1.0]
    for number in range(len(layers), 0, -1):
        kept = np.linspace(0, len(layers) - 1, number).round().astype(int) if number > 1 else [len(layers) - 1]
        for share in shares:
            if share >= _LEAST_SHARE or number == 1:
                yield [_smaller(layer, share, grid) if place in kept else None for place, layer in enumerate(layers)]


def _smaller(layer: LayerShape, share: float, grid: Grid) -> LayerShape:
    """Return a layer with a share of its hidden units, and if that is a small one, of its heads, but one at least."""
    units = min(layer.ffn_dim, -(-round(layer.ffn_dim * share) // UNITS) * UNITS)
    heads = layer.num_heads
    if share < _LEAST_SHARE and heads:
        options = [h for h, rank in grid.attention if rank == layer.head_dim]
        heads = max((h for h in options if h <= share * heads), default=min(options))
    return msgspec.structs.replace(layer, num_heads=heads, ffn_dim=units)
