"""The fit of the prediction's constants to published latencies, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
from scipy.optimize import least_squares

from export.estimate.measurements import Measurement, published
from export.estimate.roofline import FITTED, Constants, Errors, Prediction, Regime, predict

#: Where the search begins. A constant that no remaining measurement depends on stays here: INT8 as FP16.
_START = Constants(product_ms=0.01, other_ms=0.006, product=0.5, int8=1.0, attention=0.1, memory=0.9)


#: Weight of that beside a measurement's.
_STAY = 1e-3


class Compared(NamedTuple):
    """A measurement, its prediction by the fit to all, and by a fit without its network; no fit uses a ``check``."""

    measurement: Measurement
    prediction: Prediction
    left_out: Prediction

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.prediction.milliseconds / self.measurement.ms - 1

    @property
    def left_out_error(self) -> float:
        """The prediction without this network over the measurement, less 1."""
        return self.left_out.milliseconds / self.measurement.ms - 1


def fit(measurements: Sequence[Measurement]) -> Constants:
    """Return the constants with the least squares of the logarithms of the ratios of prediction to measurement."""
    names = Constants.__struct_fields__
    start = np.log([getattr(_START, name) for name in names])
    runs = [(one.work, one.mode, one.ms) for one in measurements]

    def residuals(logarithms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        constants = Constants(*map(float, np.exp(logarithms)))
        errors = [float(np.log(predict(work, None, mode, constants).milliseconds / ms)) for work, mode, ms in runs]
        return [*errors, *(_STAY * (logarithms - start))]

    found = least_squares(residuals, start, diff_step=1e-4)
    return Constants(*map(_rounded, np.exp(found.x)))


def compare() -> tuple[Compared, ...]:
    """Return all measurements beside their predictions."""
    everything = published().measurements
    fitted = [one for one in everything if not one.check]
    without = {name: fit([one for one in fitted if one.network != name]) for name in {one.network for one in fitted}}
    return tuple(
        Compared(
            one,
            predict(one.work, None, one.mode),
            predict(one.work, None, one.mode, without.get(one.network, FITTED)),
        )
        for one in everything
    )


def errors(compared: Sequence[Compared]) -> dict[Regime, Errors]:
    """Return the errors by regime.

    Fitted measurements count with the prediction of a fit without their network. Narrow networks were not fitted to.
    """
    found: dict[Regime, Errors] = {}
    for regime in get_args(Regime):
        shares = [
            one.left_out_error
            for one in compared
            if regime in one.prediction.regimes and (regime == "narrow" or not one.measurement.check)
        ]
        found[regime] = Errors(
            len(shares), _rounded(np.sqrt(np.mean(np.square(shares)))), _rounded(max(map(abs, shares)))
        )
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
