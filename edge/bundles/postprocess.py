"""Postprocessing on the device, as a bundle's manifest asks for it, so that clients may read labels and scores."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edge.bundles.manifest import LabelPostprocess, Manifest, ScorePostprocess
from edge.datatypes import Array, TensorSpec


class Postprocessor(Protocol):
    """An output of the graph to what clients read."""

    @property
    def output(self) -> TensorSpec:
        """What a client may ask for besides the outputs of the graph."""
        ...

    @property
    def reads(self) -> str:
        """The output of the graph that it needs."""
        ...

    def __call__(self, logits: Array) -> Array:
        """Return the output for logits [N, labels]."""
        ...


class LabelPostprocessor:
    """Logits (FP32, [-1, labels]) to the name of the largest (BYTES, [-1, 1]); see :class:`Postprocessor`."""

    def __init__(self, config: LabelPostprocess) -> None:
        self.output = config.made
        self.reads = config.logits
        self._labels = np.array([label.encode() for label in config.labels], np.object_)

    def __call__(self, logits: Array) -> Array:
        """Return the labels of logits."""
        labels: Array = self._labels[logits.argmax(axis=1)][:, None]
        return labels


class ScorePostprocessor:
    """The logit of a regression (FP32, [-1, 1]) as its score, of the same shape; see :class:`Postprocessor`."""

    def __init__(self, config: ScorePostprocess) -> None:
        self.output = config.made
        self.reads = config.logits

    def __call__(self, logits: Array) -> Array:
        """Return the scores."""
        return logits


def postprocessor(manifest: Manifest) -> Postprocessor | None:
    """Return the postprocessor that a manifest asks for, if it asks for one."""
    config = manifest.postprocess
    if config is None:
        return None
    return LabelPostprocessor(config) if isinstance(config, LabelPostprocess) else ScorePostprocessor(config)
