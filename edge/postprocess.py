"""Postprocessing on the device, as a bundle's manifest asks for it, so that clients may read labels."""

from __future__ import annotations

import numpy as np

from edge.datatypes import Array, TensorSpec
from edge.manifest import LabelPostprocess, Manifest


class LabelPostprocessor:
    """Logits (FP32, [-1, labels]) to the name of the largest (BYTES, [-1, 1]).

    Attributes:
        output: what a client may ask for besides the outputs of the graph.
        reads: the output of the graph that it needs.
    """

    def __init__(self, config: LabelPostprocess) -> None:
        self.output = TensorSpec(config.output, "BYTES", (-1, 1))
        self.reads = config.logits
        self._labels = np.array([label.encode() for label in config.labels], np.object_)

    def __call__(self, logits: Array) -> Array:
        """Return the labels of logits."""
        labels: Array = self._labels[logits.argmax(axis=1)][:, None]
        return labels


def postprocessor(manifest: Manifest) -> LabelPostprocessor | None:
    """Return the postprocessor that a manifest asks for, if it asks for one."""
    return LabelPostprocessor(manifest.postprocess) if manifest.postprocess else None
