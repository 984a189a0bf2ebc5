"""Errors of a file in a reduced precision against the golden outputs in FP32, and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge.bundles.golden import Golden
from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.bundle.tolerance import spread_of

#: Share of the pairs of an output's values whose order a precision may reverse.
_MOST_REVERSED = {"fp16": 0.01, "int8": 0.05}


class OutputError(NamedTuple):
    """The error of one floating-point output, relative to the spread (standard deviation) of its golden values.

    Attributes:
        rms: square root of the mean square.
        rms_interval: 95 % interval over rows; None for one row, or equal ones.
        largest: largest absolute error.
    """

    output: str
    rms: float
    rms_interval: tuple[float, float] | None
    largest: float
    rows: int


def largest_rms(precision: str) -> float:
    """Return the largest relative RMS error that a file of a precision may have.

    Two values of an output with the standard deviation s differ by a normal variable of the variance 2 s², and with
    independent errors of the RMS e·s, by another one of 2 e² s² more. The sum has the other sign with the probability
    arctan(e) / π, so that a share p of reversed pairs means e = tan(π p): 0.031 for FP16, and 0.158 for INT8.
    """
    return math.tan(math.pi * _MOST_REVERSED[precision])


def errors_of(got: Mapping[str, Array], golden: Golden, has_rows: bool) -> list[OutputError]:
    """Return the errors of the floating-point outputs; shapes are those of the golden outputs.

    Args:
        has_rows: whether the first dimension counts independent items.
    """
    found = []
    for name, want in golden.outputs.items():
        if want.dtype.kind != "f":
            continue
        spread = spread_of(want) or 1.0
        errors = (got[name].astype(np.float64) - want.astype(np.float64)) / spread
        squares = np.square(errors.reshape(len(errors) if has_rows else 1, -1)).mean(axis=1)
        found.append(
            OutputError(
                name,
                float(np.sqrt(squares.mean())),
                _interval(squares),
                float(np.abs(errors).max()),
                len(squares),
            )
        )
    return found


def check_accuracy(
    got: Mapping[str, Array], golden: Golden, has_rows: bool, option: str, subject: str, absent: Sequence[str]
) -> list[OutputError]:
    """Return the errors of a file whose precision an option asks for, ``--fp16`` or ``--int8``.

    Args:
        absent: options for real inputs that are not given, which a fix may name.

    Raises:
        UsageError: an output has another shape, is not finite, has other whole numbers or texts, or its RMS error is
            too large.
    """
    way_out = f"Leave {option} out"
    for name, want in golden.outputs.items():
        have, where = got[name], f"output {name!r} of {subject}"
        if have.shape != want.shape:
            fix = f"{way_out}, or export the model without the last steps that select values."
            raise UsageError(where, given=list(have.shape), expected=f"the shape in FP32, {list(want.shape)}", fix=fix)
        if want.dtype.kind != "f" and not np.array_equal(have, want):
            given = Raw(f"{np.count_nonzero(have != want)} of {want.size} values that differ")
            expected = "the same ones as in FP32, because they are not floating-point numbers"
            fix = f"{way_out}, or export the model with its scores in place of this output."
            raise UsageError(where, given=given, expected=expected, fix=fix)
        if want.dtype.kind == "f" and not np.isfinite(have).all():
            fix = f"{way_out}: the model exceeds the range of the precision."
            raise UsageError(where, given=Raw("NaN or Inf"), expected="finite values", fix=fix)
    errors = errors_of(got, golden, has_rows)
    precision = option.removeprefix("--")
    limit = largest_rms(precision)
    for error in errors:
        if not error.rms <= limit:
            share = f"{_MOST_REVERSED[precision]:.0%} of the pairs of values change their order"
            raise UsageError(
                f"RMS error of output {error.output!r} of {subject}",
                given=Raw(f"{error.rms:.3g} of the values' spread"),
                expected=f"at most {limit:.3g}, with which {share}",
                fix=f"{way_out}, or give real inputs with {' and '.join(absent)}." if absent else f"{way_out}.",
            )
    return errors


def measures_of(errors: list[OutputError], place: str) -> list[Measure]:
    """Return the errors as measures of a manifest; ``place`` names the inputs, the tier and the runtime."""
    return [
        Measure(metric=metric, split=f"{place}, output {error.output}", value=value, n=error.rows, interval=interval)
        for error in errors
        for metric, value, interval in (
            ("relative_rms_error", error.rms, error.rms_interval),
            ("largest_relative_error", error.largest, None),
        )
    ]


def _interval(squares: Array) -> tuple[float, float] | None:
    from export.training.intervals import known_interval

    return known_interval(lambda rows: np.sqrt(rows.mean(axis=-1)), squares)
