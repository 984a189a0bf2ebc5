"""Heads of backward attention: they move the logits of a generating model before the next token is chosen (paper 004).

A head's keys and values stay on the device, so that a change of heads between two tokens builds and copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.fields import EXPORT_AGAIN
from edge.bundles.golden import decode_npz
from edge.bundles.programs import HeadProgram
from edge.datatypes import Array
from edge.errors import BundleError, Raw
from edge.programs.program import Computed, Options, Program
from edge.runner import Handle, Runner


class HeadLayer(NamedTuple):
    """The tensors of one layer; see :class:`edge.bundles.programs.HeadProgram`."""

    keys: Array
    values: Array
    temperatures: Array


class LogitHead(Program):
    """Moves logits with the head's file of a tier."""

    def __init__(self, config: HeadProgram, runners: Mapping[str, Runner], layers: list[HeadLayer]) -> None:
        self.config, self._runners = config, runners
        names = (config.keys, config.values, config.temperatures)
        self._layers: dict[str, list[dict[str, Handle]]] = {
            tier: [{name: runner.upload(array) for name, array in zip(names, layer, strict=True)} for layer in layers]
            for tier, runner in runners.items()
        }

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        config = self.config
        return Computed({config.moved: self.move(inputs[config.logits], inputs[config.alpha], options.tier)})

    def move(self, logits: Array, alpha: Array, tier: str | None = None) -> Array:
        """Return new logits for logits [N, vocabulary] and alphas [N, 1]; no tier is the full one."""
        config = self.config
        tier = tier or next(iter(self._runners))
        runner = self._runners[tier]
        for layer in self._layers[tier]:
            outputs = runner.run({config.logits: logits, config.alpha: alpha, **layer})
            moved = outputs[config.moved]
            assert isinstance(moved, np.ndarray), "nothing is kept on the device"
            logits = moved
        return logits

    def close(self) -> None:
        self._layers = {}


def head_of(bundle: Bundle, config: HeadProgram, runners: Mapping[str, Runner]) -> LogitHead:
    """Return the program of a head bundle; raise a BundleError for malformed tensors, or another vocabulary."""
    subject = f"file {bundle.path / config.tensors}"
    vocabulary = next(spec.shape[1] for spec in bundle.manifest.inputs if spec.name == config.logits)
    arrays = decode_npz(bundle.read(config.tensors), subject)
    names = [[f"{layer}/{field}" for field in HeadLayer._fields] for layer in range(config.layers)]
    if missing := [name for of in names for name in of if name not in arrays]:
        expected = f"the arrays of {config.layers} layers, {missing[0]!r} among them"
        raise BundleError(subject, given=sorted(arrays), expected=expected, fix=EXPORT_AGAIN)
    layers = [HeadLayer(*(arrays[name] for name in of)) for of in names]
    for number, layer in enumerate(layers):
        shape = layer.keys.shape
        fits = len(shape) == 3 and shape[2] == vocabulary and layer.values.shape == (shape[0], shape[2], shape[1])
        fits = fits and layer.temperatures.shape == shape[:1]
        fits = fits and bool((layer.temperatures > 0).all())
        if not fits or any(array.dtype != np.float32 or not np.isfinite(array).all() for array in layer):
            given = Raw(f"layer {number} of {[list(array.shape) for array in layer]}")
            expected = f"finite FP32 [groups, width, {vocabulary}], [groups, {vocabulary}, width] and [groups], above 0"
            raise BundleError(subject, given=given, expected=expected, fix=EXPORT_AGAIN)
    return LogitHead(config, runners, layers)
