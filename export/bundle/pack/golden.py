"""Golden inputs and outputs of an ONNX file, their checks, and the errors of a reduced precision against them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.bundles.golden import Golden, compare, compute
from edge.bundles.manifest import Measure, Tolerance
from edge.datatypes import Array
from edge.errors import GoldenError, Raw, RunnerError, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.tolerance import spread_of, two_digits

#: The tolerance of the golden check as a share of an output's spread: other processors round differently.
_SHARES = {"fp32": 1e-3, "fp16": 0.02, "int8": 0.1}
#: The tolerance as a multiple of a file's largest difference from the outputs in FP32.
_MARGIN = 2
#: Fixes by whether the inputs are the user's.
_FIXES = {False: "Give real inputs with --inputs.", True: "Give other inputs with --inputs, or correct the model."}


def golden_outputs(
    runner: OnnxRuntimeRunner, inputs: Mapping[str, Array], max_batch_size: int, path: Path, *, given: bool
) -> dict[str, Array]:
    """Return the outputs for golden inputs; a UsageError refuses other rows, and values that are not finite."""
    rows = len(next(iter(inputs.values())))
    outputs = outputs_of(runner, inputs, max_batch_size, f"model {path}", _FIXES[given])
    for name, output in outputs.items():
        subject = f"output {name!r} of {path} on the golden inputs"
        if max_batch_size and len(output) != rows:
            fix = "Give --max-batch-size 0, because it has no batch dimension."
            raise UsageError(subject, given=Raw(f"{len(output)} rows"), expected=f"{rows}, as sent", fix=fix)
        if output.size == 0 or (output.dtype.kind == "f" and not np.isfinite(output).all()):
            found = Raw("nothing" if output.size == 0 else "NaN or Inf")
            raise UsageError(subject, given=found, expected="finite values", fix=_FIXES[given])
    return outputs


def outputs_of(
    runner: OnnxRuntimeRunner, inputs: Mapping[str, Array], max_rows: int, subject: str, fix: str = _FIXES[True]
) -> dict[str, Array]:
    """Return the outputs for any number of rows; raise a UsageError about ``subject`` if ONNX Runtime fails."""
    log = logging.getLogger(OnnxRuntimeRunner.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # the runtime's message is in the error below, without its traceback
    try:
        return compute(runner, inputs, max_rows)
    except RunnerError as error:
        expected = "outputs for the golden inputs"
        raise UsageError(subject, given=Raw(str(error.__cause__).strip()), expected=expected, fix=fix) from None
    finally:
        log.setLevel(level)


def tolerance_of(golden: Golden, precision: str, got: Mapping[str, Array] | None = None) -> Tolerance:
    """Return the tolerance on other machines, by each output's spread, and by what a file computes here, if given."""
    differences = compare(got or golden.outputs, golden, Tolerance(atol=0.0, rtol=0.0)).outputs
    limits = {
        diff.name: two_digits(
            max(_SHARES[precision] * spread_of(golden.outputs[diff.name]), _MARGIN * diff.max_abs_diff)
        )
        for diff in differences
    }
    return Tolerance(atol=max(limits.values()), rtol=0.0, outputs=limits if len(limits) > 1 else {})


def check_repeatable(
    runner: OnnxRuntimeRunner, golden: Golden, tolerance: Tolerance, max_batch_size: int, path: Path
) -> None:
    """Check that a second run of the graph gives the golden outputs."""
    again = outputs_of(runner, golden.inputs, max_batch_size, f"model {path}")
    fix = "Export the model in evaluation mode, without random operators."
    _check_same(again, golden, tolerance, GoldenError, f"{path} for the same inputs", "", fix)


def check_rows_independent(runner: OnnxRuntimeRunner, golden: Golden, tolerance: Tolerance, path: Path) -> None:
    """Check that a row's output does not depend on its neighbours: a server joins the requests of several clients."""
    row = {name: array[:1] for name, array in golden.inputs.items()}
    beside = {name: np.concatenate([array, _neighbour(golden.inputs[name])]) for name, array in row.items()}
    joined = {name: output[:1] for name, output in outputs_of(runner, beside, 0, f"model {path}").items()}
    alone = Golden(row, outputs_of(runner, row, 0, f"model {path}"))
    where, reason = f"{path} for a row alone and beside another one", ", because a server joins the requests of clients"
    fix = "Export the model in evaluation mode, or give --max-batch-size 0 if it has no batch dimension."
    _check_same(joined, alone, tolerance, UsageError, where, reason, fix)


def _check_same(
    got: Mapping[str, Array],
    golden: Golden,
    tolerance: Tolerance,
    error: type[GoldenError | UsageError],
    where: str,
    reason: str,
    fix: str,
) -> None:
    for diff in compare(got, golden, tolerance).outputs:
        if not diff.passed:
            given = Raw(f"a largest difference of {diff.max_abs_diff:.3g}")
            raise error(
                f"output {diff.name!r} of {where}", given=given, expected=f"at most {diff.allowed:.3g}{reason}", fix=fix
            )


def _neighbour(array: Array) -> Array:
    """Return another row [1, ...] of an input: zeros, or a given text, because no text is valid for every model."""
    return array[-1:] if array.dtype.kind in "OSU" else np.zeros_like(array[:1])


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
    """Return the errors of floating-point outputs; with ``has_rows``, the first dimension counts independent items."""
    found = []
    for name, want in golden.outputs.items():
        if want.dtype.kind != "f":
            continue
        spread = spread_of(want) or 1.0
        errors = (got[name].astype(np.float64) - want.astype(np.float64)) / spread
        squares = np.square(errors.reshape(len(errors) if has_rows else 1, -1)).mean(axis=1)
        rms = float(np.sqrt(squares.mean()))
        found.append(OutputError(name, rms, _interval(squares), float(np.abs(errors).max()), len(squares)))
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
            given = Raw(f"{error.rms:.3g} of the values' spread")
            expected = f"at most {limit:.3g}, with which {share}"
            fix = f"{way_out}, or give real inputs with {' and '.join(absent)}." if absent else f"{way_out}."
            subject = f"RMS error of output {error.output!r} of {subject}"
            raise UsageError(subject, given=given, expected=expected, fix=fix)
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
