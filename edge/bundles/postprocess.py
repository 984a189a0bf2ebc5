"""Postprocessing on the device, as the manifest describes it: labels and scores from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from edge.bundles.manifest import LabelPostprocess, Manifest
from edge.datatypes import Array, TensorSpec


class Postprocessor(NamedTuple):
    """Computes one further output of the model.

    Attributes:
        output: the output that a client may request besides those of the graph.
        reads: the output of the graph, [N, columns], that ``compute`` takes.
        compute: returns the output, [N, 1].
    """

    output: TensorSpec
    reads: str
    compute: Callable[[Array], Array]


def postprocessor(manifest: Manifest) -> Postprocessor | None:
    """Return the postprocessor that a manifest describes, if any."""
    config = manifest.postprocess
    if config is None:
        return None
    if not isinstance(config, LabelPostprocess):  # the score is the logit itself
        return Postprocessor(config.made, config.logits, lambda logits: logits)
    labels = np.array([label.encode() for label in config.labels], np.object_)
    return Postprocessor(config.made, config.logits, lambda logits: labels[logits.argmax(axis=1)][:, None])
