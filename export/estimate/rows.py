"""Rows of an estimate."""

from __future__ import annotations

import msgspec

from export.estimate.roofline import Prediction


class Row(msgspec.Struct, frozen=True):
    """One tier for inputs of one size.

    Attributes:
        tokens: of each input; None where the model's inputs have a fixed size.
        milliseconds: the latency, predicted or the sum of measured layers.
        prediction: the predicted latency, and its parts.
        times_faster: the latency of the first tier over this one's, both measured or both predicted.
        counted: whether the kernels were counted in an engine; otherwise the prediction has those of the fit.
        label: a prediction, or the source of the measurements.
        part: of a looped model: a file's role, or the loops of a whole request; empty for other models.
        loops: of a whole request of a looped model; ``loops_source`` says whose number it is.
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
    part: str = ""
    loops: float | None = None
    loops_source: str = ""
