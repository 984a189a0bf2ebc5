"""The cascade: the lean tier answers first, and the full tier answers again where the lean one was not sure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edge.bundles.manifest import CascadeRouter
from edge.datatypes import Array
from edge.scheduling.lane import Computed

Infer = Callable[[Mapping[str, Array]], dict[str, Array]]


def cascade(config: CascadeRouter, lean: Infer, full: Infer, inputs: Mapping[str, Array]) -> Computed:
    """Compute a request, or several that were joined, through the cascade.

    Args:
        config: what the manifest says.
        lean: computes the lean tier.
        full: computes the full tier.
        inputs: of the graph, rows first.

    Returns:
        The outputs, and which rows the full tier gave.
    """
    outputs = lean(inputs)
    unsure = margins(outputs[config.logits]) < config.margin
    if not unsure.any():
        return Computed(outputs, unsure)
    second = full({name: array[unsure] for name, array in inputs.items()})
    if unsure.all():
        return Computed(second, unsure)
    merged = {name: array.copy() for name, array in outputs.items()}
    for name, array in merged.items():
        array[unsure] = second[name]
    return Computed(merged, unsure)


def answered_by(config: CascadeRouter, full_rows: Array) -> str:
    """Return which tiers gave the rows of a request: the lean one's name, the full one's, or both with a comma."""
    if full_rows.all():
        return config.full
    return f"{config.lean},{config.full}" if full_rows.any() else config.lean


def margins(logits: Array) -> Array:
    """Return how much more likely the first label is than the second, [N] from 0 to 1, for logits [N, labels]."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    two = np.sort(exponentials / exponentials.sum(axis=1, keepdims=True), axis=1)[:, -2:]
    difference: Array = two[:, 1] - two[:, 0]
    return difference
