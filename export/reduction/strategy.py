"""Names of the ways to reduce a model."""

from __future__ import annotations

from typing import Literal, TypeAlias

#: How a model is reduced. ``search`` finds a shape for each layer, and ``uniform`` one for all layers. The others are
#: only controls of ``fewheads frontier``: ``first-layers`` keeps the first layers as they are; the last three have the
#: shapes of the search, but choose heads and units by the gradients of the task's loss, by the sizes of the weights, or
#: at random, and do not adjust what stays.
Strategy: TypeAlias = Literal["search", "uniform", "first-layers", "gradient", "weights", "random"]
#: Those of ``fewheads reduce``.
OFFERED: tuple[Strategy, ...] = ("search", "uniform")
